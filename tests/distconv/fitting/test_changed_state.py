"""What a model's calls change beside tensors changes once within a limit, as in plain torch."""

from __future__ import annotations

import gc
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import counting_module
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import distconv
from benchmarks.campaign.within import priced
from distconv.fitting.beside import Chosen
from distconv.fitting.models import Fitting
from distconv.fitting.ways import AGAIN, AWAY
from distconv.turns.turning import turn

COUNT = 0
LOG: list[float] = []
COUNTS = np.zeros(2)
TURNS = itertools.count(1)


class Cache:
    """An object that a model has, or is given."""

    def __init__(self) -> None:
        self.calls, self.tensors = 0, list[Tensor]()


class Counts(nn.Conv2d):
    """A layer that counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def counted(layer: nn.Module, x: Tensor) -> Tensor:
    """The forward of a layer of torch that is replaced."""
    layer.calls = getattr(layer, "calls", 0) + 1  # type: ignore[assignment]
    return type(layer).forward(layer, x) * layer.calls  # type: ignore[no-any-return]


class Block(nn.Module):
    """Changes one thing in each call, and computes with it."""

    total = 0

    def __init__(self, kind: str, inputs: int) -> None:
        super().__init__()
        self.conv, self.norm, self.kind = nn.Conv2d(inputs, 8, 3, padding=1), nn.BatchNorm2d(8), kind
        self.seen, self.plain, self.cache = list[int](), torch.zeros(3), Cache()
        self.counts, self.turns = np.zeros(2), itertools.cycle([1.0, 2.0, 3.0])
        if kind == "a subclass of a layer":
            self.conv = Counts(inputs, 8, 3, padding=1)
        if kind == "a replaced forward":
            self.conv.forward = types.MethodType(counted, self.conv)  # type: ignore[method-assign]

    def changed(self, x: Tensor, given: Any) -> Tensor | float:
        global COUNT
        if self.kind in ("a subclass of a layer", "a replaced forward"):
            return 1.0
        if self.kind == "a global variable":
            COUNT += 1
            return float(COUNT)
        if self.kind == "a list in a global variable":
            LOG.append(1.0)
            return sum(LOG)
        if self.kind in ("an array", "an array in a global variable"):
            counts = self.counts if self.kind == "an array" else COUNTS
            counts[0] += 1
            return float(counts[0])
        if self.kind in ("an iterator", "an iterator in a global variable"):
            return float(next(self.turns if self.kind == "an iterator" else TURNS))
        if self.kind == "a variable of another file":
            return counting_module.count()
        if self.kind == "an attribute of a class":
            type(self).total += 1
            return float(self.total)
        if self.kind == "a list":
            self.seen.append(1)
            return float(len(self.seen))
        if self.kind == "a tensor that is no buffer":
            self.plain += 1
            return self.plain.sum()
        if self.kind == "an object's attribute":
            self.cache.calls += 1
            return float(self.cache.calls)
        if self.kind == "a list that is given":
            given.append(x.mean())
            return torch.stack(given).sum()
        if self.kind == "a dict that is given":
            given["calls"] = given.get("calls", 0) + 1
            return float(given["calls"])
        assert self.kind == "an object that is given"
        given.calls += 1
        given.tensors.append(x.mean())
        return given.calls + given.tensors[-1]

    def forward(self, x: Tensor, given: Any) -> Tensor:
        y = torch.relu(self.norm(self.conv(x))) * self.changed(x, given)
        return torch.sigmoid(y) * y


KINDS = [
    "a subclass of a layer",
    "a replaced forward",
    "a global variable",
    "a list in a global variable",
    "an array",
    "an array in a global variable",
    "an iterator",
    "an iterator in a global variable",
    "a variable of another file",
    "an attribute of a class",
    "a list",
    "a tensor that is no buffer",
    "an object's attribute",
    "a list that is given",
    "a dict that is given",
    "an object that is given",
]
GIVEN = {"a list that is given": list, "a dict that is given": dict, "an object that is given": Cache}


class Net(nn.Module):
    """Blocks in the middle change nothing, and may be computed again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = Block(kind, 3), Block(kind, 8)
        self.middle = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(3)))

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return self.last(self.middle(self.first(x, given)), given)


def trained(kind: str, within: Callable[[nn.Module], nn.Module]) -> list[Any]:
    """Losses, gradients and all that has been changed, of two steps."""
    global COUNT, TURNS
    COUNT, Block.total, TURNS = 0, 0, itertools.count(1)
    COUNTS[:] = 0
    LOG.clear()
    counting_module.reset()
    torch.manual_seed(0)
    net, x = within(Net(kind).double()), torch.randn(2, 3, 48, 32, dtype=torch.float64)
    found: list[Any] = []
    for _ in range(2):
        given = GIVEN.get(kind, list)()
        loss = net(x, given).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in net.parameters())]
        net.zero_grad()
        found.append(torch.tensor(given.calls if isinstance(given, Cache) else len(given)))
        found += [x.detach() for x in getattr(given, "tensors", given) if isinstance(x, Tensor)]
    for block in (net.first, net.last):
        found += [
            torch.tensor([block.cache.calls, len(block.seen), getattr(block.conv, "calls", 0)]),
            torch.tensor([block.counts[0], next(block.turns)]),
            block.plain,
            *(b.clone() for b in block.buffers()),
        ]
    return [*found, torch.tensor([COUNT, sum(LOG), Block.total, COUNTS[0], next(TURNS), counting_module.calls])]


class OneWay(Fitting):
    """Takes the first way of a kind, whether it fits or not; ``how``: `AGAIN`, `AWAY` or "parts"."""

    def __init__(self, how: str) -> None:
        super().__init__("1GiB")
        self._limit = priced(self._limit, 1e-12 if how == AWAY else 1e-6)
        self._how, self.taken = how, list[str]()
        self.shown = lambda *_: None  # so that all ways are found

    def _fit(self, call: Any, others: Any, most: float = 0.0) -> Chosen:
        timeline = call.timeline(self._limit)
        assert timeline is not None
        ways = self._ways(call, timeline, 0.8 * max(timeline.alive()))
        parts = [way for way in ways if way.partition is not None]
        whole = [way for way in ways if any(each.kind == self._how for each in way.ways) and way.partition is None]
        of_parts = ways if call.module in self._differentiated else parts
        (found, *_) = of_parts if self._how == "parts" else whole
        self.taken.append(str(found))
        return Chosen(found, float("inf"), others, repeated=timeline.repeated())


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, list[Any]]]:
    """What plain torch computes, by kind."""
    yield {kind: trained(kind, lambda net: net) for kind in KINDS}


@pytest.mark.parametrize("how", [AGAIN, AWAY, "parts"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_call_changes_changes_once(kind: str, how: str, plain: dict[str, list[Any]]) -> None:
    fitting = OneWay(how)
    found = trained(kind, lambda net: turn(net, (fitting, None), None, "distconv.fit"))
    assert len(found) == len(plain[kind])
    for each, expected in zip(found, plain[kind], strict=True):
        torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-9)


class Draws(nn.Module):
    """Draws from the generators of Python, NumPy and torch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * random.random() * np.random.rand() * torch.rand(())


def test_to_follow_a_call_draws_no_random_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    x, found = torch.randn(1, 3, 16, 16), []
    for fits in (False, True):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model = distconv.fit(Draws(), "1GiB") if fits else Draws()
        found.append([model(x).sum().item(), random.random(), np.random.rand(), torch.rand(()).item()])
    assert found[0] == found[1] and "Draws runs whole" in capsys.readouterr().err


class Sometimes(nn.Module):
    """Changes a list from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        if self.calls:
            self.seen.append(1)
        return torch.sigmoid(x) * x


def test_a_change_that_comes_later_is_refused() -> None:
    layers = [nn.Sequential(nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1), Sometimes()) for n in range(4)]
    net, x = nn.Sequential(*layers).double(), torch.randn(2, 3, 48, 32, dtype=torch.float64)
    turn(net, (OneWay(AGAIN), None), None, "distconv.fit")
    net(x).sum().backward()
    for _, each in layers:
        each.calls = 1
    with pytest.raises(RuntimeError, match="has changed an attribute or an argument, which it had not when"):
        net(x)


def test_no_call_of_parts_keeps_its_model() -> None:
    net = distconv.in_turn(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), "height=2", memory="4KiB")
    net(torch.randn(1, 1, 8, 8)).sum().backward()
    kept = weakref.ref(net)
    del net
    gc.collect()
    assert kept() is None


class Hooked(nn.Module):
    """A hook halves a weight; it finds the weight as a variable of its own, or as a global variable."""

    def __init__(self, is_global: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        if is_global:
            HOOKED[:] = [self.last]
        self.last.register_forward_pre_hook(
            (lambda *_: halve(HOOKED[0])) if is_global else (lambda *_: halve(self.last))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.first(x)))


HOOKED: list[nn.Conv2d] = []


def halve(layer: nn.Conv2d) -> None:
    layer.weight.data = layer.weight.data * 0.5


@pytest.mark.parametrize("is_global", [False, True])
def test_a_hook_changes_the_model_that_runs_and_no_other_while_a_call_is_followed(
    is_global: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for within in (None, "900KiB"):
        torch.manual_seed(0)
        net, x = Hooked(is_global).double(), torch.randn(1, 3, 96, 64, dtype=torch.float64)
        if within:
            distconv.fit(net, within)
        losses = [net(x).square().mean() for _ in range(2)]
        losses[1].backward()
        found.append([*(loss.detach() for loss in losses), *net.parameters(), net.first.weight.grad])
    for each, expected in zip(*found, strict=True):
        torch.testing.assert_close(each, expected, rtol=1e-10, atol=1e-12)
    line = capsys.readouterr().err
    assert ("gets data without numbers while a call is followed" in line) == is_global
    assert ("Hooked runs in parts" in line) != is_global
