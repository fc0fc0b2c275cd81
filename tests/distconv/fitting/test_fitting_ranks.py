"""Ranks each of which keeps within a limit of all memory: numbers are those of one process, peaks as predicted."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks as Processes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.campaign.within import priced
from distconv import settings
from distconv.fitting.beside import Chosen
from distconv.fitting.following import followed
from distconv.fitting.models import Fitting
from distconv.fitting.ranks import Ranks
from distconv.model.direct.chains.call import PRICES
from distconv.model.parallelize import distributed_script
from distconv.settings.partition import Partition
from distconv.tensors.memory import TensorMemory
from distconv.tensors.mesh import make_mesh
from distconv.turns.turning import script_in_turn


class Block(nn.Module):
    """In place, with running statistics and random numbers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.conv(x)).relu_())


class Pair(nn.Module):
    """The second half is given what ranks have shards of."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Block(2 if number == 0 else 8) for number in range(4)))
        self.head = nn.Sequential(Block(8), Block(8), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def build(apart: bool) -> tuple[list[nn.Module], Tensor]:
    """The models that a script calls one after another, and the input of the first."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    pair = Pair()
    return [pair.body, pair.head] if apart else [pair], torch.randn(2, 2, 64, 24)


def trained(models: list[nn.Module], x: Tensor) -> list[Tensor]:
    """Losses, parameters and buffers after two steps."""
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, 1e-2, momentum=0.9)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        optimizer.zero_grad()
        y = x
        for model in models:
            y = model(y)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = [*parameters, *(b for model in models for b in model.buffers())]
    return [torch.tensor(losses), *(each.detach().clone() for each in state)]


def within(partition: str, share: float, apart: bool) -> tuple[float, list[str]]:
    """The largest error of a rank within a share of what it takes whole, and how each model is computed."""
    models, x = build(apart)
    expected = trained(copy.deepcopy(models), x)
    ranks = Partition.parse(partition)
    mesh, taken = make_mesh(ranks), []
    whole = max(followed(models[0], (x,), {}, True, PRICES["cpu"], ranks).alive())
    fitting = Fitting(int(share * whole), Ranks(ranks, mesh))
    fitting._limit = priced(fitting._limit, 1e-6)
    fit = fitting._fit

    def noted(*args: Any) -> Chosen:
        found = fit(*args)
        taken.append(str(found.fit))
        return found

    fitting._fit = noted  # type: ignore[method-assign]
    with distributed_script(mesh), script_in_turn((fitting, None), ranks=mesh):
        found = trained(models, x)
    error = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return error, taken


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("partition", "share", "apart", "how"),
    [
        ("sample=2", 1.2, False, ["whole"]),
        ("height=2", 0.6, False, ["whole, "]),
        ("height=2", 1.1, True, ["whole", "whole", "whole, 1 segment recomputed"]),
    ],
)
def test_ranks_within_a_limit_compute_what_one_process_does(
    ranks: Callable[[int], Processes], partition: str, share: float, apart: bool, how: list[str]
) -> None:
    (error, chosen), (other, nothing) = ranks(2).run(within, partition, share, apart)
    assert max(error, other) < 1e-10
    assert len(chosen) == len(how) and all(each.startswith(start) for each, start in zip(chosen, how, strict=True))
    assert not nothing, "the first rank chooses for all"
    assert share > 1 or "recomputed" in chosen[0]  # with copies of the buffers that it moves


def inferred(partition: str) -> tuple[float, str]:
    """The error of a rank's call without gradients, of which not all fits, and what was said."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)
    model, x = nn.Sequential(*layers), torch.randn(1, 2, 256, 64)
    expected, ranks = model(x).detach(), Partition.parse(partition)
    mesh, said = make_mesh(ranks), io.StringIO()
    way = Fitting("1400KiB", Ranks(ranks, mesh)), None
    with contextlib.redirect_stderr(said), distributed_script(mesh), script_in_turn(way, ranks=mesh), torch.no_grad():
        found = model(x)
    return float((found - expected).abs().max()), said.getvalue()


def test_what_no_backward_keeps_is_computed_in_parts_of_each_rank(ranks: Callable[[int], Processes]) -> None:
    (error, said), (other, nothing) = ranks(2).run(inferred, "height=2")
    assert max(error, other) < 1e-12
    assert "Sequential runs in parts height=16 in turn" in said and "no way fits" not in said
    assert not nothing, "the first rank chooses for all"


class Count(TorchDispatchMode):
    """The most bytes of all plain tensors at once."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.memory, self.peak = TensorMemory(), 0
        self.memory.count(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.memory.count([x for x in tree_leaves(result) if type(x) is Tensor])
        self.peak = max(self.peak, self.memory.now)
        return result


def peaks(partition: str) -> tuple[int, int]:
    """Of a rank's step in float32: bytes as counted, and as predicted without the scratch of kernels."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(2, 2, 64, 48)
    ranks = Partition.parse(partition)
    mesh = make_mesh(ranks)
    timeline = followed(model, (x,), {}, True, PRICES["cpu"], ranks)
    timeline.scratch = [0] * len(timeline.scratch)
    count = Count(*model.parameters(), *model.buffers(), x)
    unchecked = settings.options({"check": "off"})  # which has a table of half a MiB
    with unchecked, distributed_script(mesh), contextlib.ExitStack() as around:
        model(x).sum().backward()  # what is made once for all calls
        model.zero_grad()
        around.enter_context(count)
        model(x).sum().backward()
    return count.peak, max(timeline.alive())


@pytest.mark.gloo
@pytest.mark.parametrize("partition", ["sample=2", "height=2"])
def test_the_peak_of_a_rank_is_as_predicted(ranks: Callable[[int], Processes], partition: str) -> None:
    for counted, predicted in ranks(2).run(peaks, partition):
        assert predicted == pytest.approx(counted, rel=0.1)


class Exhausts(nn.Module):
    """A layer whose first real call runs out of memory on some ranks."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.calls = fails, 0
        self.given: Any = None  # An iterator is not put back.
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if is_followed(x):
            return x * 2
        self.calls += 1
        self.total += 1
        failing = Path(os.environ["FAILS"]) if "FAILS" in os.environ else None
        if failing is not None and failing.exists() and self.fails:
            failing.unlink()  # A file is not the model's state, which is put back.
            raise torch.OutOfMemoryError("out of memory")
        return x * 2


def is_followed(x: Tensor) -> bool:
    local = x._local_tensor if isinstance(x, DTensor) else x
    return isinstance(local, FakeTensor)


def exhausted(limit: str, failing: int, iterates: bool) -> tuple[Any, ...]:
    """Of a call that runs out of memory on some ranks, at least on one: its error, notes, and what was said; or the
    error of its result, and what the model has counted.
    """
    os.environ.pop("FAILS", None)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    convolutions = nn.Conv2d(2, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
    lacking = Exhausts(torch.distributed.get_rank() >= failing)
    model, x = nn.Sequential(convolutions[0], lacking, nn.ReLU(), convolutions[1]), torch.randn(1, 2, 256, 64)
    expected, ranks = model(x).detach(), Partition.parse("height=2")
    lacking.given, os.environ["FAILS"] = iter(range(2)) if iterates else None, tempfile.mkstemp()[1]
    mesh, said = make_mesh(ranks), io.StringIO()
    way = Fitting(limit, Ranks(ranks, mesh)), None
    with contextlib.redirect_stderr(said), distributed_script(mesh), script_in_turn(way, ranks=mesh), torch.no_grad():
        try:
            found = model(x)
        except torch.OutOfMemoryError as error:
            return str(error), error.__notes__, said.getvalue()
    return float((found - expected).abs().max()), (lacking.calls, int(lacking.total)), said.getvalue()


def test_a_call_that_ran_out_of_memory_on_one_rank_is_made_again_on_all(ranks: Callable[[int], Processes]) -> None:
    (error, counts, said), (other, others, nothing) = ranks(2).run(exhausted, "1400KiB", 1, False)
    assert max(error, other) < 1e-12
    assert counts == others == (2, 2), "one call without ranks, and one with them"
    assert said.count("ran out of memory, once more: OutOfMemoryError: out of memory") == 1 and not nothing


def test_what_one_rank_cannot_put_back_lets_the_error_stay_on_all(ranks: Callable[[int], Processes]) -> None:
    for error, (note,), _ in ranks(2).run(exhausted, "1400KiB", 1, True):
        assert error == "out of memory"
        assert "the call is not made again within less, as it has changed" in note and "given" in note


def test_a_whole_call_of_ranks_is_not_made_again(ranks: Callable[[int], Processes]) -> None:
    for error, (note,), said in ranks(2).run(exhausted, "1GiB", 0, False):
        assert error == "out of memory" and "once more" not in said
        assert note.endswith("as other ranks may be within it, and wait for this one")
