"""Patched torch against stock torch: every kind of convolution, every way of calling it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forced import Forced, divided, forced
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mucudnn
from mucudnn.runtime import shim

ALGORITHMS = ("stock", "gemm", "fft")

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1-D": (lambda: nn.Conv1d(3, 4, 5), (4, 3, 20)),
    "2-D": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 3, 9, 8)),
    "3-D": (lambda: nn.Conv3d(2, 3, 3, padding=1), (2, 2, 5, 6, 7)),
    "no bias": (lambda: nn.Conv2d(3, 4, 3, bias=False), (3, 3, 9, 8)),
    "strided": (lambda: nn.Conv2d(3, 4, 3, stride=(2, 3), padding=1), (3, 3, 12, 11)),
    "dilated": (lambda: nn.Conv2d(3, 4, 3, dilation=(2, 3), padding=2), (3, 3, 12, 11)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 7, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), (3, 4, 7, 8)),
    "even kernel": (lambda: nn.Conv2d(3, 4, (4, 2), padding=(1, 0)), (3, 3, 9, 8)),
    "1x1": (lambda: nn.Conv2d(3, 4, 1), (3, 3, 5, 4)),
    "over-padded": (lambda: nn.Conv1d(3, 4, 3, padding=5), (3, 3, 4)),
    "same": (lambda: nn.Conv2d(3, 4, (4, 3), padding="same"), (3, 3, 9, 8)),
    "reflect": (lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), (3, 3, 9, 8)),
    "replicate": (lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="replicate"), (3, 3, 9, 8)),
    "circular": (lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="circular"), (3, 3, 9, 8)),
    "unbatched": (lambda: nn.Conv2d(3, 4, 3), (3, 9, 8)),
    "one sample": (lambda: nn.Conv2d(3, 4, 3), (1, 3, 9, 8)),
    "transposed 1-D": (lambda: nn.ConvTranspose1d(3, 4, 4, stride=2), (4, 3, 9)),
    "transposed 2-D": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), (3, 3, 6, 7)),
    "transposed 3-D": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (2, 2, 3, 4, 5)),
    "transposed grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2, output_padding=1), (3, 4, 6, 7)),
}


def results(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and every gradient, for a loss that weighs all outputs differently."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    output = module(x)
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)
    (output * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": output.detach(), "x": x.grad, **gradients}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].stride() == tensor.stride(), name
        error = (actual[name] - tensor).norm() / tensor.norm().clamp_min(1e-30)
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_layer(kind: str, algorithm: str) -> None:
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    module, x = build().double(), torch.randn(shape, dtype=torch.float64)
    expected = results(module, x)
    with mucudnn.patched(database=":memory:", board=Forced(algorithm)):
        assert_same(results(module, x), expected)
        assert_same(results(module, x), expected)  # the first call plans, the second only runs
        assert divided() == (0 if algorithm == "stock" and kind in ("unbatched", "one sample") else 3)


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
@pytest.mark.filterwarnings("error")
def test_the_key_of_gpus_is_served_and_given_back() -> None:
    """Without a GPU: host tensors, sent to the kernels under CUDA's key."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    x, w, dy = torch.randn(4, 3, 9, 9), torch.randn(4, 3, 3, 3), torch.randn(4, 4, 9, 9)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    convolution, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default

    def through_key() -> tuple[torch.Tensor, ...]:
        gradients = backward.redispatch(key, dy, x, w, [4], *geometry, [True, True, True])
        return convolution.redispatch(key, x, w, None, *geometry), *gradients

    names = "aten::convolution", "aten::convolution_backward"
    expected, before = through_key(), [torch._C._dispatch_dump(name) for name in names]
    with forced("fft"):
        for found, wanted in zip(through_key(), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert divided() == 3
    assert [torch._C._dispatch_dump(name) for name in names] == before


@pytest.mark.parametrize("channels_last", ["input", "weight", "both"])
@pytest.mark.parametrize("kind", ["2-D", "3-D", "strided", "depthwise", "1x1", "transposed 2-D", "transposed 3-D"])
def test_memory_formats_are_torchs(kind: str, channels_last: str) -> None:
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    module, x = build().double(), torch.randn(shape, dtype=torch.float64)
    memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    if channels_last != "input":
        module = module.to(memory_format=memory_format)
    if channels_last != "weight":
        x = x.contiguous(memory_format=memory_format)
    expected = results(module, x)
    with forced("fft"):
        assert_same(results(module, x), expected)
        assert divided() == 3


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(2, 3),
    "expanded batch": lambda x: x[:1].expand(4, -1, -1, -1),
    "expanded channels": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "every second": lambda x: x[::2, :, ::2],
    "offset": lambda x: x[1:, :, 1:, 1:],
}


@pytest.mark.parametrize("algorithm", ["gemm", "fft"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_other_tensors(view: str, algorithm: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Conv2d(3, 4, 3).double(), VIEWS[view](torch.randn(4, 3, 9, 9, dtype=torch.float64))
    expected = results(module, x)
    with forced(algorithm):
        assert_same(results(module, x), expected)
        assert divided() == 3


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_gradients_of_any_subset(wanted: tuple[bool, ...]) -> None:
    def gradients() -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((4, 3, 9, 9), (4, 3, 3, 3), (4,))]
        for tensor, requires_grad in zip(tensors, wanted, strict=True):
            tensor.requires_grad_(requires_grad)
        functional.conv2d(*tensors).sin().sum().backward()
        return [tensor.grad for tensor in tensors]

    expected = gradients()
    with forced("fft"):
        for actual, gradient in zip(gradients(), expected, strict=True):
            assert (actual is None) == (gradient is None)
            if gradient is not None:
                torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-12)
        assert divided() == 1 + wanted[0] + wanted[1]  # the forward one too


def no_grad(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(x)


def inference_mode(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return module(x).clone()


def double_backward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    return torch.cat([x.grad.flatten(), *(p.grad.flatten() for p in module.parameters())])


def vmap_over_inputs(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(module)(torch.stack([x, 2 * x]))


def vmap_over_weights(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    stacked = {name: torch.stack([p, -p]) for name, p in module.named_parameters()}
    return torch.func.vmap(lambda parameters: torch.func.functional_call(module, parameters, (x,)))(stacked)


def per_sample_gradients(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (sample[None],)).pow(2).sum()

    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def forward_derivative(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(module, (x,), (x.cos(),))[1]


def checkpointed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    checkpoint(module, x, use_reentrant=False).pow(2).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    "use",
    [
        no_grad,
        inference_mode,
        double_backward,
        vmap_over_inputs,
        vmap_over_weights,
        per_sample_gradients,
        forward_derivative,
        checkpointed,
    ],
)
def test_every_use(use: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    module, x = nn.Conv2d(3, 4, 3, padding=1).double(), torch.randn(4, 3, 7, 7, dtype=torch.float64)
    expected = use(module, x)
    module.zero_grad()
    with forced("fft"):
        torch.testing.assert_close(use(module, x), expected, rtol=1e-10, atol=1e-10)
        assert divided() >= 1


def test_compiled_module() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).double(), torch.randn(4, 3, 7, 7).double()
    expected = results(module, x)
    with forced("fft"):
        compiled = torch.compile(module)
        actual = results(compiled, x)
        assert divided() == 3
    for name, tensor in expected.items():
        torch.testing.assert_close(actual.get(name, actual.get(f"_orig_mod.{name}")), tensor, rtol=1e-10, atol=1e-10)


def test_autocast_in_both_passes() -> None:
    """The backward pass too runs under autocast here, which must not reach into an algorithm's own products."""
    torch.manual_seed(0)
    module, x = nn.Conv2d(3, 4, 5), torch.randn(4, 3, 16, 16)

    def run() -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return results(module, x)

    expected = run()
    assert expected["output"].dtype == torch.bfloat16
    with forced("fft"):
        assert_same(run(), expected, tolerance=1e-2)
        assert divided() == 3
    module = module.double()
    with torch.autocast("cpu", dtype=torch.bfloat16), forced("fft"):
        arguments = (x.double(), module.weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
        with torch.autocast("cpu", enabled=False):
            exact = torch.ops.aten.convolution(*arguments)
        actual = torch.ops.aten.convolution_backward(
            exact.detach(), x.double(), module.weight.detach(), None, *arguments[3:], [True, False, False]
        )[0]
    expected_gradient = functional.conv_transpose2d(exact, module.weight)
    torch.testing.assert_close(actual, expected_gradient.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weight_gradients_round_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 2, 12, 12).to(dtype), torch.randn(3, 2, 3, 3).to(dtype).requires_grad_()
    exact = w.detach().double().requires_grad_()
    functional.conv2d(x.double(), exact).sum().backward()
    for algorithm in ("gemm", "fft"):
        w.grad = None
        with forced(algorithm):
            functional.conv2d(x, w).sum().backward()
            assert divided() == 2
        spacing = torch.finfo(dtype).eps * exact.grad.abs()
        assert ((w.grad.double() - exact.grad).abs() <= 0.51 * spacing + 1e-4).all()


@pytest.mark.parametrize("algorithm", ["gemm", "fft"])
def test_deterministic_runs_are_bitwise_equal(algorithm: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Conv2d(3, 4, 5, padding=2), torch.randn(7, 3, 33, 31)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            with forced(algorithm):
                runs += [results(module, x), results(module, x)]
                assert divided() == 3
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(run[name], tensor) for name, tensor in runs[0].items())


CALLS: dict[str, Callable[[], Any]] = {
    "channels": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 2, 3, 3)),
    "dtypes": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 3, 3).double()),
    "kernel larger than input": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 7, 3)),
    "bias": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 3, 3), torch.zeros(3)),
    "stride 0": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 3, 3), stride=0),
    "negative padding": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 3, 3), padding=-1),
    "groups": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 3, 3), groups=2),
    "not a tensor": lambda: functional.conv2d([1.0], torch.zeros(4, 3, 3, 3)),  # type: ignore[arg-type]
    "no rows": lambda: functional.conv2d(torch.zeros(2, 3, 0, 5), torch.zeros(4, 3, 3, 3), padding=2),
}


@pytest.mark.parametrize("call", CALLS)
def test_wrong_calls_raise_torchs_own_errors(call: str) -> None:
    with pytest.raises(Exception) as expected:
        CALLS[call]()
    with mucudnn.patched(database=":memory:", board=Forced("fft")), pytest.raises(expected.type) as actual:
        CALLS[call]()
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (2, 0, 5, 5)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_empty_inputs(shape: tuple[int, ...]) -> None:
    module, x = nn.Conv2d(shape[1], 4, 3, padding=2), torch.zeros(shape)
    expected = results(module, x)
    with mucudnn.patched(database=":memory:", board=Forced("fft")):
        actual = results(module, x)
        assert divided() == 0
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_complex_and_integer_convolutions_are_torchs() -> None:
    x, w = torch.randn(2, 3, 5, 5, dtype=torch.complex64), torch.randn(4, 3, 3, 3, dtype=torch.complex64)
    integers = torch.ones(1, 1, 4, 4, dtype=torch.int64), torch.ones(1, 1, 2, 2, dtype=torch.int64)
    expected = functional.conv2d(x, w), functional.conv2d(*integers)
    with mucudnn.patched(database=":memory:"):
        # Torch makes a complex convolution of real ones, which may be divided.
        torch.testing.assert_close(functional.conv2d(x, w), expected[0])
        assert torch.equal(functional.conv2d(*integers), expected[1])


def test_threads() -> None:
    torch.manual_seed(0)
    module, inputs = nn.Conv2d(3, 4, 3).double(), [torch.randn(2 + i % 3, 3, 9, 9).double() for i in range(12)]
    expected = [module(x) for x in inputs]
    actual: dict[int, torch.Tensor] = {}
    with forced("fft"):

        def work(i: int) -> None:
            actual[i] = module(inputs[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(mucudnn.report()) == divided() == 3
    for i, tensor in enumerate(expected):
        torch.testing.assert_close(actual[i], tensor, rtol=1e-12, atol=1e-12)


def test_limit_zero_leaves_everything_to_torch() -> None:
    module, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9)
    expected = results(module, x)
    with mucudnn.patched(workspace_limit=0, database=":memory:", board=Forced("fft")):
        actual = results(module, x)
        assert mucudnn.report() == []
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_unpatch_leaves_torch_as_it_was() -> None:
    def registered() -> list[str]:
        dump = torch._C._dispatch_dump("aten::convolution") + torch._C._dispatch_dump("aten::convolution_backward")
        return [line for line in dump.splitlines() if "CPU" in line]

    x, w = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3)
    before, expected = registered(), functional.conv2d(x, w)
    mucudnn.patch(database=":memory:")
    mucudnn.patch(database=":memory:", workspace_limit="1MiB")
    assert mucudnn.is_patched()
    assert registered() != before
    mucudnn.unpatch()
    mucudnn.unpatch()
    assert not mucudnn.is_patched()
    assert registered() == before
    assert mucudnn.report() == []
    assert torch.equal(functional.conv2d(x, w), expected)


def test_patched_restores_what_was_before() -> None:
    mucudnn.patch(database=":memory:", workspace_limit="1MiB")
    outer = shim.current()
    with mucudnn.patched(database=":memory:", workspace_limit="2MiB") as session:
        assert shim.current() is session
        assert session.settings.workspace_limit == 2 * 2**20
    assert shim.current() is outer


def test_a_wrong_setting_raises_and_patches_nothing() -> None:
    with pytest.raises(ValueError, match="workspace_limit='much'"):
        mucudnn.patch(workspace_limit="much")
    assert not mucudnn.is_patched()


def test_a_tensor_subclass_is_not_asked_to_convolve_by_the_shim() -> None:
    seen: list[str] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    x, w = torch.randn(1, 1, 4, 4).as_subclass(Watched), torch.randn(1, 1, 1, 1, requires_grad=True)

    def calls() -> list[str]:
        """In a double backward pass, whose convolutions torch itself calls on the tensors that it has saved."""
        y = functional.conv2d(x, w)
        (gradient,) = torch.autograd.grad(y, w, torch.ones_like(y).requires_grad_(), create_graph=True)
        plain = gradient.as_subclass(torch.Tensor).sum()
        seen.clear()
        plain.backward()
        return list(seen)

    with mucudnn.patched(database=":memory:"):
        calls()  # makes the plans
        assert "_convolution" not in calls()
