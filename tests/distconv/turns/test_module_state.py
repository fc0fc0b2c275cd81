"""What modules keep in turn: attributes, containers, buffers and hooks are those of one process after a call."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict, defaultdict
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distconv
from distconv.turns.copies import Spare

TOLERANCE = 1e-10


@dataclass
class Answer:
    sample: Tensor
    rows: int


class Remembering(nn.Module):
    """A model with a memory: in an attribute, in a list of its own, in the caller's list, and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.last: Any = None
        self.all: list[Tensor] = []
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, cache: list[Any], at: list[int]) -> Answer:
        y = self.conv(x if self.last is None else x + self.last)
        self.last = y
        self.all.append(y.mean())
        self.seen += 1
        self.calls += 1
        cache[at[0]] = y * 2
        at[0] += 1
        return Answer(self.conv(y), y.shape[2])


def test_what_a_model_keeps_is_whole_and_kept_once() -> None:
    torch.manual_seed(0)
    plain, x = Remembering().double(), torch.randn(1, 2, 9, 5, dtype=torch.float64)
    turned = distconv.in_turn(copy.deepcopy(plain), "height=4")
    own = turned.all
    outcomes = []
    for model in (plain, turned):
        cache, at = [None, None, None], [0]
        with torch.no_grad():
            answers = [model(x, cache, at) for _ in range(2)]
        outcomes.append([*(a.sample for a in answers), model.last, *model.all, model.seen, *cache[:2]])
        assert (model.calls, at, cache[2], answers[0].rows) == (2, [2], None, 9)
    assert turned.all is own
    assert all(type(x) is Tensor for x in outcomes[1])
    for found, right in zip(*reversed(outcomes), strict=True):
        torch.testing.assert_close(found, right, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_kept_tensor_is_differentiated_too() -> None:
    torch.manual_seed(0)
    plain, x = Remembering().double(), torch.randn(1, 2, 9, 5, dtype=torch.float64)
    turned = distconv.in_turn(copy.deepcopy(plain), "height=4")
    for model in (plain, turned):
        answer = model(x, [None], [0])
        (answer.sample.square().sum() + model.last.square().sum() + model.all[0]).backward()
    torch.testing.assert_close(turned.conv.weight.grad, plain.conv.weight.grad)


class Observed(nn.Module):
    """Installs its hooks in its first call, as libraries do that return the activations of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))
        self.handles: list[Any] = []
        self.found: OrderedDict[str, Tensor] = OrderedDict()
        self.calls: defaultdict[str, int] = defaultdict(int)

    def _observe(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.found[f"{type(module).__name__} {len(self.found)}"] = output
        self.calls[type(module).__name__] += 1

    def forward(self, x: Tensor) -> Tensor:
        self.found.clear()
        if not self.handles:
            self.handles = [layer.register_forward_hook(self._observe) for layer in self.body]
        self.body(x)
        return torch.stack(list(self.found.values())).sum(0)


def test_hooks_that_forward_installs_run_once_for_each_part() -> None:
    torch.manual_seed(0)
    plain, x = Observed().double(), torch.randn(1, 2, 9, 5, dtype=torch.float64)
    turned = distconv.in_turn(copy.deepcopy(plain), "height=4")
    for _ in range(2):
        torch.testing.assert_close(turned(x), plain(x), rtol=TOLERANCE, atol=TOLERANCE)
        assert list(turned.found) == list(plain.found)
        assert turned.calls == plain.calls and turned.calls["unknown"] == plain.calls["unknown"] == 0
        for name, value in plain.found.items():
            torch.testing.assert_close(turned.found[name], value, rtol=TOLERANCE, atol=TOLERANCE)
    for handle in turned.handles:
        handle.remove()
    assert not any(layer._forward_hooks for layer in turned.body)


factor: ContextVar[float] = ContextVar("factor", default=1.0)


class Scaled(nn.Module):
    """Reads a context variable, and sets it for what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        token = factor.set(2 * factor.get())
        try:
            return self.conv(self.conv(x) * factor.get())
        finally:
            factor.reset(token)


def test_context_variables_of_the_caller_hold_in_each_part() -> None:
    plain, x = Scaled(), torch.randn(1, 2, 9, 5)
    turned = distconv.in_turn(copy.deepcopy(plain), "height=4")
    token = factor.set(3.0)
    try:
        torch.testing.assert_close(turned(x), plain(x))
        assert factor.get() == pytest.approx(3.0)
    finally:
        factor.reset(token)


@pytest.mark.parametrize("way", ["inference", "forward", "backward"])
def test_nothing_of_a_call_stays_until_python_looks_for_cycles(way: str) -> None:
    turned = distconv.in_turn(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)), "height=2")
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(way != "inference"):
            x = torch.randn(1, 2, 8, 4)
            y = turned(x)
        given, result = weakref.ref(x), weakref.ref(y)
        if way == "backward":
            y.sum().backward()
        del x, y
        assert given() is None and result() is None
    finally:
        gc.enable()


class Owner:
    pass


def test_containers_serve_again_unless_something_else_has_them() -> None:
    def taken(owner: Owner) -> list[Any]:
        spare = Spare(owner)
        outer, inner = spare.copy({"a": 1}), spare.empty(OrderedDict)
        outer["inner"] = inner
        inner["value"] = outer["a"]
        return [id(outer), id(inner), inner]

    first = Owner()
    *ids, kept = taken(first)
    del first
    second = Owner()
    again = taken(second)
    assert again[0] == ids[0] and again[1] != ids[1] and kept == {"value": 1}
    assert again[2] == {"value": 1}
