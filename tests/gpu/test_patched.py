"""Patched torch on a GPU: layers, networks, and every way in which streams, threads and graphs meet a planned call."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1-D": (lambda: nn.Conv1d(6, 8, 5), (6, 6, 64)),
    "2-D": (lambda: nn.Conv2d(6, 8, 3, padding=1), (6, 6, 17, 16)),
    "no bias": (lambda: nn.Conv2d(6, 8, 3, bias=False), (6, 6, 17, 16)),
    "strided": (lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1), (6, 6, 17, 16)),
    "dilated": (lambda: nn.Conv2d(6, 8, 3, dilation=2), (6, 6, 17, 16)),
    "grouped": (lambda: nn.Conv2d(6, 8, 3, groups=2), (6, 6, 17, 16)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 8, 3, stride=2, output_padding=1), (6, 6, 9, 8)),
    "3-D": (lambda: nn.Conv3d(4, 6, 3, padding=1), (4, 4, 8, 8, 8)),
}


def results(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and every gradient, for a loss that weighs all outputs differently."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    output = module(x)
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)
    (output * weights).sum().backward()
    return {"output": output.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].stride() == tensor.stride(), name
        error = (actual[name].double() - tensor.double()).norm() / tensor.double().norm().clamp_min(1e-30)
        assert error < tolerance, f"{name}: {error}"


def planned() -> int:
    """Convolutions met that torch's own kernel does not serve."""
    return sum(record.division != f"stock({record.problem.extent})" for record in mucudnn.report())


@pytest.mark.usefixtures("slow_stock")
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind: str, dtype: torch.dtype, tolerance: float, memory_format: str, device: torch.device) -> None:
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    module, x = build().to(device, dtype), torch.randn(shape, dtype=dtype, device=device)
    if memory_format == "channels_last":
        if x.dim() != 4:
            pytest.skip("no such format")
        module, x = module.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    expected = results(module, x)
    with mucudnn.patched(workspace_limit="1MiB", database=":memory:", progress="off"):
        assert_same(results(module, x), expected, tolerance)
        assert_same(results(module, x), expected, tolerance)  # the first call plans, the second only runs
        assert len(mucudnn.report()) == 3
        assert planned() >= 1
        assert all(record.workspace <= 2**20 for record in mucudnn.report())


class Net(nn.Module):
    """Two residual stages, as ResNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, stride=2, padding=3)
        self.first = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.shortcut = nn.Conv2d(16, 32, 1, stride=2)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.stem(x))
        x = functional.relu(self.norm(self.first(x)) + x)
        x = functional.relu(self.second(x) + self.shortcut(x))
        return self.head(self.up(x).mean((2, 3)))


def losses(net: nn.Module, x: torch.Tensor, target: torch.Tensor, steps: int) -> Iterator[float]:
    """Of training steps."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), target)
        loss.backward()
        optimizer.step()
        yield loss.item()


@pytest.mark.usefixtures("slow_stock")
def test_training(device: torch.device) -> None:
    torch.manual_seed(0)
    net, x = Net().to(device).double(), torch.randn(8, 3, 32, 32, dtype=torch.float64, device=device)
    target = torch.randint(5, (8,), device=device)
    expected = list(losses(copy.deepcopy(net), x, target, 5))
    with mucudnn.patched(workspace_limit="8MiB", database=":memory:", progress="off"):
        found = list(losses(net, x, target, 5))
        assert planned() >= 6
    assert found == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < expected[0]


@pytest.mark.usefixtures("slow_stock")
def test_autocast(device: torch.device) -> None:
    torch.manual_seed(0)
    module, x = nn.Conv2d(8, 16, 3, padding=1).to(device), torch.randn(8, 8, 20, 20, device=device)

    def run() -> dict[str, torch.Tensor]:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return results(module, x)

    expected = run()
    with mucudnn.patched(workspace_limit="8MiB", database=":memory:", progress="off"):
        assert_same(run(), expected, 1.5e-2)
        assert planned() >= 1


@pytest.mark.usefixtures("slow_stock")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weight_gradients_round_no_more_than_their_parts(dtype: torch.dtype, device: torch.device) -> None:
    """Every part's own result may be rounded once, as cuDNN writes half types, and then the sum of the parts is."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, 12, 12, device=device).to(dtype)
    w = torch.randn(8, 4, 3, 3, device=device).to(dtype).requires_grad_()
    exact = w.detach().double().requires_grad_()
    functional.conv2d(x.double(), exact).sum().backward()
    with mucudnn.patched(workspace_limit="1MiB", database=":memory:", progress="off"):
        functional.conv2d(x, w).sum().backward()
    absolute = torch.zeros_like(exact).requires_grad_()
    functional.conv2d(x.double().abs(), absolute).sum().backward()  # no partial sum is larger
    assert ((w.grad.double() - exact.grad).abs() <= torch.finfo(dtype).eps * absolute.grad).all()


@pytest.fixture
def convolution(cuda: torch.device) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Conv2d(16, 32, 5, padding=2).to(cuda).double(), torch.randn(16, 16, 24, 24, device=cuda).double()


@pytest.mark.usefixtures("slow_stock")
def test_the_callers_stream(convolution: tuple[nn.Module, torch.Tensor]) -> None:
    """Work that the stream has yet to do comes first; a call on another stream would read what was there before."""
    module, x = convolution
    expected = module(2 * x)
    stream = torch.cuda.Stream()
    with mucudnn.patched(workspace_limit="1MiB", database=":memory:", progress="off"), torch.no_grad():
        module(x)
        assert planned() == 1
        source = x.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            source.mul_(2)
            result = module(source)
            del source
        stream.synchronize()
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("slow_stock")
def test_a_planned_call_does_not_wait_for_the_device(convolution: tuple[nn.Module, torch.Tensor]) -> None:
    module, x = convolution
    with mucudnn.patched(workspace_limit="1MiB", database=":memory:", progress="off"):
        results(module, x)
        assert planned() == 3
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        ended = torch.cuda.Event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            results(module, x)
            ended.record()
            waited = ended.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not waited
        torch.cuda.synchronize()


@pytest.mark.usefixtures("slow_stock")
def test_a_cuda_graph(convolution: tuple[nn.Module, torch.Tensor]) -> None:
    """Captured forward and backward, replayed on other data."""
    module, x = convolution
    module.zero_grad()
    held = x.clone().requires_grad_()
    with mucudnn.patched(workspace_limit="1MiB", database=":memory:", progress="off"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                module(held).square().sum().backward()
        torch.cuda.current_stream().wait_stream(side)
        assert planned() == 3
        module.zero_grad(set_to_none=True)
        held.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = module(held)
            output.square().sum().backward()
    for factor in (3.0, -0.5):
        with torch.no_grad():
            held.copy_(factor * x)
        graph.replay()
        torch.cuda.synchronize()
        plain = copy.deepcopy(module)
        plain.zero_grad(set_to_none=True)
        alone = held.detach().clone().requires_grad_()
        expected = plain(alone)
        expected.square().sum().backward()
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(held.grad, alone.grad, rtol=1e-10, atol=1e-9)
        for mine, its in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-10, atol=1e-8)


@pytest.mark.usefixtures("slow_stock")
def test_threads(device: torch.device) -> None:
    """Each with a stream of its own, the same convolutions at once."""
    torch.manual_seed(0)
    build, shape = LAYERS["2-D"]
    modules = [build().to(device).double() for _ in range(4)]
    inputs = [torch.randn(shape, dtype=torch.float64, device=device) for _ in modules]
    expected = [results(module, x) for module, x in zip(modules, inputs, strict=True)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(5):
                if device.type == "cuda":
                    with torch.cuda.stream(torch.cuda.Stream()):
                        found = results(modules[index], inputs[index])
                        torch.cuda.current_stream().synchronize()
                else:
                    found = results(modules[index], inputs[index])
                assert_same(found, expected[index], 1e-11)
        except BaseException as error:
            failures.append(error)

    if device.type == "cuda":
        torch.cuda.synchronize()
    with mucudnn.patched(workspace_limit="1MiB", database=":memory:", progress="off"):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(modules))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(mucudnn.report()) == 3
    assert not failures


@pytest.mark.usefixtures("slow_stock")
def test_plans_come_from_the_database(device: torch.device, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second session with the file times nothing, and plans the same."""
    torch.manual_seed(0)
    module, x = nn.Conv2d(32, 64, 5, padding=2).to(device), torch.randn(32, 32, 28, 28, device=device)
    with mucudnn.patched(workspace_limit="8MiB", database=f"{tmp_path}/times.sqlite", progress="off") as first:
        results(module, x)
    monkeypatch.setattr("mucudnn.timing.clock.seconds", _never)
    monkeypatch.setattr("mucudnn.timing.clock.first_seconds", _never)
    monkeypatch.setattr("mucudnn.planning.trial_runner.TrialRunner.laps", _never)
    with mucudnn.patched(workspace_limit="8MiB", database=f"{tmp_path}/times.sqlite", progress="off") as second:
        results(module, x)
    assert [record.parts for record in second.records()] == [record.parts for record in first.records()]
    assert len(second.records()) == 3


def _never(*_: object, **__: object) -> float:
    raise AssertionError("it is timed again")
