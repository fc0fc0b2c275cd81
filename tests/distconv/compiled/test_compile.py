"""torch.compile of distributed models: one graph, and the losses, gradients and statistics of one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition

import distconv
from distconv.model import homes
from distconv.rules.convolution import plan
from distconv.settings import options


class Net(nn.Module):
    """A residual block, whose shortcut has a stride, between a transposed convolution and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.wide = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.narrow = nn.Conv2d(8, 8, 3, padding=1)
        self.shortcut = nn.Conv2d(4, 8, 1, stride=2)
        self.frozen = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.classifier = nn.Linear(8, 4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.up(x), self.up(x)], 1)[:, 2:6]
        y = self.narrow(nn.functional.relu(self.norm(self.wide(x)), inplace=True)) + self.shortcut(x)
        return self.classifier(self.pool(self.frozen(y)).relu().mean((2, 3)))


class Broken(Net):
    """A graph ends where a number of it is printed."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y * self.unused.sum()


class Attention(nn.Module):
    """Keys and values go to the other rank, which sends none: twice the same, nothing, is sent from there."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(4, 4, 1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.projection(x).flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)


def steps(model: Any, plain: nn.Module, train: int = 3) -> dict[str, Tensor]:
    """What some steps of training give, and one evaluation after them."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9)
    found: dict[str, Tensor] = {}
    for step in range(train):
        generator = torch.Generator().manual_seed(step)
        x, targets = torch.randn(5, 4, 9, 8, generator=generator).double(), torch.arange(5) % 4
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), targets)
        loss.backward()
        found[f"loss {step}"] = torch.tensor(loss.item())
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                found[f"gradient {step} of {name}"] = distconv.whole_state(parameter.grad).clone()
        optimizer.step()
    for name, buffer in plain.named_buffers():
        found[f"buffer {name}"] = distconv.whole_state(buffer).clone()
    plain.eval()
    with torch.no_grad():
        found["evaluation"] = distconv.gather(model(x)).clone()
    return found


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


@contextmanager
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The relative errors that are not below 1e-10; one of all where names differ."""
    if found.keys() != expected.keys():
        return {str(found.keys() ^ expected.keys()): float("inf")}
    errors = {
        name: float((found[name] - right).abs().max() / right.abs().max().clamp(min=1e-3))
        for name, right in expected.items()
    }
    return {name: error for name, error in errors.items() if not error <= 1e-10}


def trained(partition: str, way: str, kind: type[nn.Module]) -> tuple[dict[str, float], dict[str, int], int]:
    """(errors, what Dynamo counted after training, graphs after evaluation)."""
    expected = steps(reference := made(kind), reference)
    mesh = distconv.init(partition, device_type="cpu")
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    with fresh():
        plain = made(kind)
        if way == "before":
            model = distconv.parallelize(torch.compile(plain, **options), mesh)
        elif way == "after":
            model = torch.compile(distconv.parallelize(plain, mesh), **options)
        else:
            plain.compile(**options)
            model = distconv.parallelize(plain, mesh)
        found = steps(model, plain)
        return worst(found, expected), dict(counters["stats"]), sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    "partition, way, kind",
    [
        ("sample=2", "before", Net),
        ("height=2", "after", Net),
        ("channel=2", "method", Net),
        ("channel=2", "after", Attention),
    ],
)
def test_compiled_training_equals_one_process(
    ranks: Callable[[int], Ranks], partition: str, way: str, kind: type[nn.Module]
) -> None:
    pool = ranks(2)
    if pool.backend == "mpi" and partition != "height=2":
        pytest.skip("over Gloo")
    for errors, counted, breaks in pool.run(trained, partition, way, kind):
        assert not errors
        assert counted["unique_graphs"] == 2  # of training and of evaluation
        assert breaks == 0


def left(partition: str) -> tuple[dict[str, float], list[str], str]:
    """(errors, warnings, what is raised with fullgraph) of a model that is no single graph."""
    expected = steps(reference := made(Broken), reference)
    mesh = distconv.init(partition, device_type="cpu")
    with fresh(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = distconv.parallelize(made(Broken), mesh)
        found = steps(torch.compile(plain, backend="aot_eager"), plain)
        told = [str(warning.message) for warning in caught if "runs without it" in str(warning.message)]
        try:
            torch.compile(plain, backend="aot_eager", fullgraph=True)(torch.ones(5, 4, 9, 8).double())
        except torch._dynamo.exc.Unsupported as error:
            return worst(found, expected), told, str(error)
    return worst(found, expected), told, ""


def test_a_model_that_is_no_single_graph_runs_without_a_compiler(ranks: Callable[[int], Ranks]) -> None:
    for errors, told, error in ranks(2).run(left, "height=2"):
        assert not errors
        assert len(told) == 1 and "Broken" in told[0]
        assert "graph_break" in error


def elsewhere(partition: str) -> dict[str, float]:
    """Compiled: a function of the program that calls a model, a part of a model, a plain model, a loss."""
    mesh = distconv.init(partition, device_type="cpu")
    expected = steps(reference := made(Net), reference, 1)
    with fresh(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = distconv.parallelize(made(Net), mesh)
        function = torch.compile(lambda x: plain(x) * 1.0, backend="eager")
        errors = worst(steps(function, plain, 1), expected)
        plain = distconv.parallelize(made(Net), mesh)
        plain.narrow = torch.compile(plain.narrow, backend="eager")
        found = {name.replace("_orig_mod.", ""): value for name, value in steps(plain, plain, 1).items()}
        errors |= worst(found, expected)
        alone = made(Net)
        errors |= worst(steps(torch.compile(alone, backend="eager", fullgraph=True), alone, 1), expected)
        copied = copy.deepcopy(alone)
        with torch.compiler.set_stance("force_eager"):
            model = torch.compile(distconv.parallelize(copied, mesh), backend="eager", fullgraph=True)
            x = torch.ones(5, 4, 9, 8).double()
            errors |= worst({"stance": distconv.gather(model(x))}, {"stance": alone(x)})
    return errors


def test_what_is_compiled_around_or_within_a_model_changes_nothing(ranks: Callable[[int], Ranks]) -> None:
    for errors in ranks(2).run(elsewhere, "sample=2"):
        assert not errors


class Drawn(nn.Module):
    """Random numbers in place and beside, of shards and of what all ranks hold, and space that is flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 2, 1)
        self.classifier = nn.Linear(2 * 9 * 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout2d(nn.functional.dropout(self.layer(x), 0.3), 0.3)
        x = torch.native_dropout(x, 0.2, True)[0] + torch.randint_like(x, 3)
        x = x + (torch.rand_like(x) - torch.rand_like(x)) * torch.randn_like(x)
        return nn.functional.dropout(self.classifier(x.flatten(1)), 0.3) + torch.bernoulli(x.sigmoid()).mean()


def drawn(partition: str, how: str) -> list[dict[str, float]]:
    """Errors against the same without a compiler, which all draw the same numbers, and what is drawn after them."""
    mesh = distconv.init(partition, device_type="cpu")
    found = []
    with fresh(), options({"random": how}):
        for compiled in (False, True):
            plain = distconv.parallelize(made(Drawn), mesh)
            model = torch.compile(plain, backend="aot_eager", fullgraph=True) if compiled else plain
            torch.manual_seed(2)
            found.append(steps(model, plain, 2) | {"drawn after": torch.rand(3)})
    assert float(found[0]["gradient 0 of layer.weight"].abs().max()) > 0
    return [worst(found[1], found[0])]


@pytest.mark.parametrize("how", ["same", "apart"])
def test_a_graph_draws_what_is_drawn_without_a_compiler(ranks: Callable[[int], Ranks], how: str) -> None:
    pool = ranks(2)
    if pool.backend == "mpi":
        pytest.skip("over Gloo")
    for errors in pool.run(drawn, "height=2", how):
        assert errors == [{}]


class Halos(nn.Module):
    """Halos between neighbours in both directions, and some in one only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def traced_operators(partition: str) -> dict[str, list[str]]:
    """The collectives, waits and convolutions of the graphs of a model with edges and buckets, in their order."""
    found: dict[str, list[str]] = {}

    def keep(which: str) -> Any:
        def compile(graph: Any, inputs: Any) -> Any:
            names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            kept = ("_c10d_functional", "convolution", "batch_norm_backward")
            found[which] = [name.split(".")[1] for name in names if any(part in name for part in kept)]
            return graph.forward

        return compile

    backend = aot_autograd(
        fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=min_cut_rematerialization_partition
    )
    kept = homes.FIRST_BUCKET_BYTES, homes.BUCKET_BYTES, plan.LEAST_BYTES
    homes.FIRST_BUCKET_BYTES = homes.BUCKET_BYTES = 64
    plan.LEAST_BYTES = 0
    try:
        with fresh():
            model = distconv.parallelize(made(Halos), distconv.init(partition, device_type="cpu"))
            torch.compile(model, backend=backend, fullgraph=True)(torch.ones(1, 2, 40, 5).double()).sum().backward()
    finally:
        homes.FIRST_BUCKET_BYTES, homes.BUCKET_BYTES, plan.LEAST_BYTES = kept
    return found


def test_waits_come_after_what_does_not_need_them(ranks: Callable[[int], Ranks]) -> None:
    first, *others = ranks(2).run(traced_operators, "height=2")
    collectives = ("all_to_all_single", "all_gather_into_tensor", "all_reduce", "wait_tensor")
    for other in others:  # or ranks would wait for one another for ever, though some receive nothing
        for which, names in other.items():
            assert [n for n in names if n in collectives] == [n for n in first[which] if n in collectives]
    forward, backward = first["forward"], first["backward"]
    assert forward[:3] == ["all_to_all_single", "convolution", "wait_tensor"]
    assert backward.count("all_reduce") > 2  # one of batch norm, and one of each bucket
    assert backward[-1] == "wait_tensor"
    assert "convolution_backward" in backward[backward.index("all_reduce") : backward.index("wait_tensor", -2)]


def test_running_statistics_of_split_channels_cross_once_behind_all_else(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(traced_operators, "channel=2"):
        forward = found["forward"]
        assert forward.count("all_gather_into_tensor") == 1
        assert "convolution" not in forward[forward.index("all_gather_into_tensor") :]
