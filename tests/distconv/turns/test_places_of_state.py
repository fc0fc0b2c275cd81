"""State that a model changes counts once, wherever it is, in parts and where a call is followed within a limit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import counting_module
import pytest
import torch
from torch import Tensor, nn
from ways_in_turn import WAYS

steps = 0
first_seen: int


def step() -> None:
    global steps
    steps += 1


class Once:
    """An object whose class has slots, and whose subclass has not."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Twice(Once):
    """An object with a slot and a dict."""


class Added(list[float]):
    """A list that adds up its items."""

    total = 0.0

    def append(self, item: float) -> None:
        super().append(item)
        self.total += item


class Cached:
    """A class that gets an attribute at its first use."""


class Counting:
    """What a model calls to change its state, and what that state is."""

    def __init__(self) -> None:
        self.twice, self.added = Twice(), Added()
        self.keys, self.referred = {Twice(): "key"}, Twice()
        self.weak = weakref.ref(self.referred)
        self.key = Twice()
        self.by_object = weakref.WeakKeyDictionary({self.key: 0})
        self.level_ = 0

    @property
    def level(self) -> int:
        return self.level_

    @level.setter
    def level(self, value: int) -> None:
        counting_module.table["level"] = counting_module.table.get("level", 0) + 1
        self.level_ = value


def of_module(own: Counting) -> float:
    counting_module.calls += 1
    counting_module.table["calls"] = counting_module.calls
    counting_module.Total.calls += 1
    return counting_module.calls


def of_modules_function(own: Counting) -> float:
    return counting_module.count()


def imported_within(own: Counting) -> float:
    import counting_module as again
    from counting_module import table

    again.calls += 1
    table["n"] = table.get("n", 0) + 1
    return again.calls


def of_two_functions(own: Counting) -> float:
    step()
    return steps


def of_globals(own: Counting) -> float:
    globals()["steps"] += 1
    return steps


def of_a_new_global(own: Counting) -> float:
    global first_seen
    try:
        first_seen += 1
    except NameError:
        first_seen = 1
    return first_seen


def of_a_setter(own: Counting) -> float:
    own.level += 1
    return own.level + counting_module.table["level"]


def of_slots_and_dict(own: Counting) -> float:
    own.twice.count += 1
    own.twice.other = getattr(own.twice, "other", 0) + 1  # type: ignore[attr-defined]
    return own.twice.count


def of_a_list_with_attributes(own: Counting) -> float:
    own.added.append(1.0)
    return own.added.total


def of_keys(own: Counting) -> float:
    for key in own.keys:
        key.count += 1
    return next(iter(own.keys)).count


def of_weak_references(own: Counting) -> float:
    referred = own.weak()
    assert referred is not None
    referred.count += 1
    own.by_object[own.key] += 1
    return own.by_object[own.key]


def of_a_function(own: Counting) -> float:
    of_a_function.calls = getattr(of_a_function, "calls", 0) + 1  # type: ignore[attr-defined]
    return of_a_function.calls  # type: ignore[attr-defined]


def of_a_new_attribute(own: Counting) -> float:
    Cached.calls = getattr(Cached, "calls", 0) + 1  # type: ignore[attr-defined]
    return Cached.calls  # type: ignore[attr-defined]


KINDS = {
    function.__name__: function
    for function in (
        *(of_module, of_modules_function, imported_within, of_two_functions, of_globals, of_a_setter, of_a_new_global),
        *(of_slots_and_dict, of_a_list_with_attributes, of_keys, of_weak_references, of_a_function),
        of_a_new_attribute,
    )
}


class Layer(nn.Module):
    def __init__(self, change: Callable[[Counting], float]) -> None:
        super().__init__()
        self.conv, self.change, self.own = nn.Conv2d(2, 2, 3, padding=1), change, Counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * (1 + self.change(self.own))


def trained(change: Callable[[Counting], float], within: Callable[[nn.Module], Any]) -> list[Any]:
    """The losses of two steps, and what state is left."""
    global steps
    steps = 0
    globals().pop("first_seen", None)
    counting_module.reset()
    vars(of_a_function).clear()
    if "calls" in vars(Cached):
        del Cached.calls  # type: ignore[attr-defined]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), Layer(change), nn.ReLU(), nn.Conv2d(2, 2, 1)).double()
    within(net)
    own: Counting = net[1].own  # type: ignore[assignment]
    found: list[Any] = []
    for _ in range(2):
        loss = net(torch.linspace(-1, 1, 256).double().view(2, 2, 8, 8)).square().mean()
        loss.backward()
        found.append(round(loss.item(), 9))
    found += [steps, counting_module.kept(), own.level, own.twice.count, vars(own.twice), own.added, own.added.total]
    found += [[key.count for key in own.keys], own.referred.count, own.by_object[own.key]]
    return [*found, dict(vars(of_a_function)), getattr(Cached, "calls", None)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_state_counts_once(kind: str, way: str) -> None:
    assert trained(KINDS[kind], WAYS[way]) == trained(KINDS[kind], lambda net: net)


def test_hooks_of_all_modules_are_called_once() -> None:
    found = []
    for within in (lambda net: net, *WAYS.values()):
        calls: list[int] = []

        def hook(module: nn.Module, inputs: Any, output: Tensor, calls: list[int] = calls) -> Tensor | None:
            if isinstance(module, nn.ReLU):
                calls.append(len(calls))
                return output * (1 + len(calls))
            return None

        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 1)).double()
        within(net)
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
        with handle:
            losses = [net(torch.linspace(-1, 1, 256).double().view(2, 2, 8, 8)).square().mean() for _ in range(2)]
        sum(losses).backward()  # type: ignore[union-attr]
        found.append([calls, *(round(loss.item(), 9) for loss in losses), net[0].weight.grad.sum().item()])  # type: ignore[union-attr, operator]
    assert all(each[:3] == found[0][:3] and abs(each[3] - found[0][3]) < 1e-9 for each in found[1:])
