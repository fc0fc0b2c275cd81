"""torch.compile of distributed models: one graph, and the losses, gradients and statistics of one process."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import fresh, made, steps, worst
from ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters

import distconv
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


class Written(Net):
    """It reads and changes parameters where autograd records nothing, before it computes with them.

    Its graph has an output that no loss depends on.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.wide.weight.mul_(0.9).clamp_(-0.2, 0.2)
            self.classifier.bias.copy_(self.narrow.weight.mean((1, 2, 3))[:4])
        self.beside = self.up(x)
        return super().forward(x)


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
        ("height=2", "after", Written),
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


class Changing(nn.Module):
    """It changes its input, and its loss may depend on the output, the input or both."""

    def __init__(self, has_parameters: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1) if has_parameters else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.relu_())


def of_changed_inputs(partition: str) -> dict[str, float]:
    """The errors of the gradients of inputs that a compiled model changes in place."""
    mesh, wrong = distconv.init(partition, device_type="cpu"), {}
    for has_parameters, uses in itertools.product((True, False), ("output", "input", "both")):
        torch.manual_seed(1)
        plain, x, found = Changing(has_parameters).double(), torch.randn(2, 4, 9, 8).double(), []
        with fresh():
            for model in (copy.deepcopy(plain), torch.compile(distconv.parallelize(plain, mesh), backend="aot_eager")):
                own = x.clone() if not found else distconv.shard(x, mesh)
                given = own.requires_grad_() * 1.0
                y = model(given)
                terms = {"output": [y], "input": [given], "both": [y, given]}[uses]
                sum(term.pow(3).sum() for term in terms).backward()  # type: ignore[union-attr]
                found.append(distconv.gather(own.grad) if found else own.grad)
        wrong |= {f"{has_parameters} {k}": e for k, e in worst({uses: found[1]}, {uses: found[0]}).items()}
    return wrong


def test_inputs_that_a_compiled_model_changes_have_gradients(ranks: Callable[[int], Ranks]) -> None:
    pool = ranks(2)
    if pool.backend == "mpi":
        pytest.skip("over Gloo")
    assert pool.run(of_changed_inputs, "width=2") == [{}, {}]


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


def laid_out(partition: str) -> list[dict[str, Any]]:
    """How the gradients of parameters lie, without and with a compiler."""
    found: list[dict[str, Any]] = []
    with fresh():
        for compiled in (False, True):
            plain = distconv.parallelize(made(Net), distconv.init(partition, device_type="cpu"))
            model = torch.compile(plain, backend="aot_eager", fullgraph=True) if compiled else plain
            model(torch.ones(5, 4, 9, 8).double()).sum().backward()
            grads = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
            found.append(
                {
                    name: (type(grad), grad.shape, grad.stride(), getattr(grad, "_spec", None))
                    for name, grad in grads.items()
                }
            )
    return found


def test_gradients_lie_as_without_a_compiler(ranks: Callable[[int], Ranks]) -> None:
    for eager, compiled in ranks(2).run(laid_out, "channel=2"):
        assert compiled == eager


def losses_of(model: Any, sizes: tuple[int, ...]) -> list[float]:
    random, found = torch.Generator().manual_seed(1), []
    for size in sizes:
        loss = model(torch.randn(size, 3, 4, 4, dtype=torch.float64, generator=random)).square().mean()
        loss.backward()
        found.append(float(loss.detach()))
    return found


def in_batches(sizes: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """The losses of a compiled model on ranks for batches of these sizes, and those of plain torch."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    net = copy.deepcopy(plain.double())
    expected = losses_of(plain, sizes)
    with distconv.distributed_script(distconv.init("sample=2", device_type="cpu")):
        return losses_of(torch.compile(net, backend="aot_eager"), sizes), expected


@pytest.mark.gloo
def test_a_last_batch_of_which_one_rank_has_as_much_as_before(ranks: Callable[[int], Ranks]) -> None:
    """Of four samples and of three the first rank has two: it needs a new graph all the same, as the other one does."""
    for found, expected in ranks(2).run(in_batches, (4, 3, 4, 3)):
        assert found == pytest.approx(expected, rel=1e-12)
