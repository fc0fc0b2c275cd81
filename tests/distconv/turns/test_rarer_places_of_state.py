"""State that a model changes counts once, also in places of Python, NumPy and torch that few programs use."""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from ways_in_turn import WAYS


class Level(enum.Enum):
    """Members with attributes."""

    LOW = 1
    HIGH = 2


class Registry(type):
    """A class of classes, which keeps their only objects."""

    made: ClassVar[dict[type, Any]] = {}
    calls = 0

    def __call__(cls, *args: Any) -> Any:
        Registry.calls += 1
        if cls not in Registry.made:
            Registry.made[cls] = super().__call__(*args)
        return Registry.made[cls]


class Single(metaclass=Registry):
    def __init__(self) -> None:
        self.count = 0


class Local(threading.local):
    total = 0.0


variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
listed: contextvars.ContextVar[list[int]] = contextvars.ContextVar("listed")
local = Local()
array = np.zeros((2, 6))
row, turned = array[1], array.T[2:4]
layers = collections.ChainMap({"n": 0}, {"m": 0})
sobol = torch.quasirandom.SobolEngine(2)
flag = torch.ones(1)
table: dict[Tensor, int] = {}
NAME = "DISTCONV_TEST_COUNT"
counted = 0


remembered: Any = None


def count(n: int) -> int:
    global counted
    counted += 1
    return counted


def of_a_context(step: int) -> float:
    variable.set(variable.get() + 1)
    listed.get().append(variable.get())
    return variable.get() + len(listed.get())


def of_a_thread(step: int) -> float:
    local.total += 1
    local.seen = [*getattr(local, "seen", []), step]
    local.kept.append(step)
    return local.total + len(local.kept)


def of_a_member(step: int) -> float:
    Level.HIGH.count = getattr(Level.HIGH, "count", 0) + 1  # type: ignore[attr-defined]
    Level.LOW.steps.append(step)  # type: ignore[attr-defined]
    return Level.HIGH.count + len(Level(1).steps)  # type: ignore[attr-defined]


def of_the_environment(step: int) -> float:
    os.environ[NAME] = str(int(os.environ.get(NAME, "0")) + 1)
    return int(os.environ[NAME])


def of_a_sequence(step: int) -> float:
    return float(sobol.draw(1).sum())


def of_a_metaclass(step: int) -> float:
    Single().count += 1
    return Single().count + Single.calls  # that of its class


def of_views(step: int) -> float:
    row[2] += 1
    array[1, 3] += 2
    return float(array.sum() + turned[0, 1] + turned[1, 1])


def of_layers(step: int) -> float:
    layers["n"] += 1
    return layers["n"]


def of_a_tensor(step: int) -> float:
    flag.count = getattr(flag, "count", 0) + 1  # type: ignore[attr-defined]
    flag.steps.append(step)  # type: ignore[attr-defined]
    return flag.count + len(flag.steps)  # type: ignore[attr-defined]


def of_tensors_as_keys(step: int) -> float:
    table[flag] += 1
    table[torch.ones(1)] = step
    return table[flag] + len(table)


def of_a_remembering_function(step: int) -> float:
    return remembered(3) + remembered(step)


KINDS = {
    each.__name__: each
    for each in (
        *(
            of_a_context,
            of_a_thread,
            of_a_member,
            of_the_environment,
            of_a_sequence,
            of_a_metaclass,
            of_views,
            of_layers,
        ),
        *(of_a_remembering_function, of_a_tensor, of_tensors_as_keys),
    )
}


def _begin() -> None:
    global counted, remembered
    counted, remembered = 0, functools.lru_cache(count)
    os.environ.pop(NAME, None)
    variable.set(0)
    listed.set([])
    vars(local).clear()
    local.kept = []
    vars(Level.HIGH).pop("count", None)
    Level.LOW.steps = []  # type: ignore[attr-defined]
    Registry.made.clear()
    Registry.calls = 0
    array.fill(0)
    layers["n"] = 0
    sobol.reset()
    vars(flag).pop("count", None)
    flag.steps = []  # type: ignore[attr-defined]
    table.clear()
    table[flag] = 0


def _state() -> list[Any]:
    single = Registry.made.get(Single)
    found = [counted, os.environ.get(NAME), variable.get(), listed.get(), dict(vars(local)), Level.LOW.steps]  # type: ignore[attr-defined]
    found += [getattr(Level.HIGH, "count", None), single and single.count, Registry.calls, array.tolist(), row.tolist()]
    found += [dict(vars(flag)), list(table.values()), next(iter(table)) is flag]
    return [*found, dict(layers), sobol.num_generated, sobol.draw(1).tolist()]


class Layer(nn.Module):
    def __init__(self, change: Callable[[int], float]) -> None:
        super().__init__()
        self.conv, self.change, self.step = nn.Conv2d(2, 2, 3, padding=1), change, 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.conv(x) * (1 + self.change(self.step))


def trained(change: Callable[[int], float], within: Callable[[nn.Module], Any]) -> list[Any]:
    """The losses of three steps, of two shapes of inputs, and what state is left."""
    _begin()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), Layer(change), nn.ReLU(), nn.Conv2d(2, 2, 1)).double()
    within(net)
    found: list[Any] = []
    for rows in (8, 8, 12):
        x = torch.linspace(-1, 1, 32 * rows).double().view(2, 2, rows, 8)
        loss = net(x).square().mean()
        loss.backward()
        found.append(round(loss.item(), 9))
    return [*found, _state()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_state_counts_once(kind: str, way: str) -> None:
    assert trained(KINDS[kind], WAYS[way]) == trained(KINDS[kind], lambda net: net)
