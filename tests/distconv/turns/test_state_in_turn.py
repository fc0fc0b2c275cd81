"""What models do to their state while they compute happens once in turn: kinds of it against stock torch in float64."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import data_behind
import kinds_of_state
import pytest
import torch
from kinds_of_state import KINDS, Noted, kept, seen
from torch import Tensor, nn

import distconv
from distconv.turns import reach

TOLERANCE = 1e-10

PARTS = ("height=2", "sample=2", "width=2")


def _state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from (("kept " + name, value) for name, value in kept.items())
    yield from (("seen", list(seen)), ("calls", kinds_of_state.calls), ("total", Noted.total))
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().clone()
        yield f"{name}.grad", None if parameter.grad is None else parameter.grad.clone()
        yield from ((f"{name}.{own}", value) for own, value in vars(parameter).items())
    for name, module in model.named_modules():
        for own, value in vars(module).items():
            if not own.startswith("_") and own not in ("before", "optimizer", "pairs"):
                yield f"{name}.{own}", value
        yield from ((f"{name}.{own}", value.clone()) for own, value in module._buffers.items() if value is not None)


def _values(value: Any) -> Any:
    """What is compared: tensors as lists of numbers."""
    if isinstance(value, Tensor):
        assert type(value) in (Tensor, nn.Parameter)
        return value.detach().clone()
    if isinstance(value, Noted):
        return _values(vars(value))
    if isinstance(value, dict):
        return {name: _values(item) for name, item in value.items()}
    if isinstance(value, list | tuple | collections.deque):
        return [_values(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else None


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(is_same(a[name], b[name]) for name in a)
    return type(a) is type(b) and bool(a == b)


def trained(build: Callable[[], nn.Module], parts: str | None) -> list[tuple[str, Any]]:
    """What three steps leave."""
    kept.clear()
    seen.clear()
    kinds_of_state.calls = Noted.total = 0
    kinds_of_state.numbers = itertools.count()
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if parts is not None:
        distconv.in_turn(model, parts)
    found: list[tuple[str, Any]] = []
    for step in range(3):
        x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((f"loss {step}", loss.detach()))
    return found + [(name, _values(value)) for name, value in _state(model)]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("least", [reach.CONSTANT, 0], ids=["small", "large"])
def test_what_a_model_does_to_its_state_happens_once(least: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "CONSTANT", least)  # Parts share larger tensors until they change them.
    right = trained(KINDS[name], None)
    for parts in PARTS:
        found = trained(KINDS[name], parts)
        assert [name for name, _ in found] == [name for name, _ in right], parts
        for (what, value), (_, expected) in zip(found, right, strict=True):
            assert is_same(value, expected), f"{what} with {parts}: {value} instead of {expected}"


class Conditioned(nn.Module):
    """Is given tensors by its attributes, of which gradients are asked, and keeps its last result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.condition, self.factor = nn.Conv2d(2, 2, 3, padding=1), torch.zeros(()), torch.ones(())
        self.last: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.conv(x * self.factor) + self.condition + self.last
        return self.last


@pytest.mark.parametrize("parts", PARTS)
def test_gradients_of_tensors_that_a_model_has_as_attributes(parts: str) -> None:
    outcomes = []
    for is_turned in (False, True):
        torch.manual_seed(0)
        model = Conditioned()
        if is_turned:
            distconv.in_turn(model, parts)
        source = torch.randn(4, 2, 8, 8, requires_grad=True)
        model.factor = torch.randn((), requires_grad=True)
        model.condition = source * 2
        model(torch.randn(4, 2, 8, 8))
        model(torch.randn(4, 2, 8, 8)).square().sum().backward()
        outcomes.append([source.grad, model.factor.grad, model.conv.weight.grad, model.last])
        assert model.condition.grad_fn is not None
    assert is_same(*([_values(x) for x in outcome] for outcome in outcomes))


@pytest.mark.parametrize("parts", PARTS)
def test_backward_of_an_earlier_call_reads_what_a_later_one_has_assigned(parts: str) -> None:
    outcomes = []
    for is_turned in (False, True):
        torch.manual_seed(0)
        model = kinds_of_state.layer(lambda self, _: setattr(self.weight, "data", 0.5 * self.weight.data))()
        if is_turned:
            distconv.in_turn(model, parts)
        (model(x := torch.randn(4, 2, 8, 8)) + model(0.5 * x)).square().mean().backward()
        outcomes.append([p.grad for p in model.parameters()])
    assert is_same(*map(_values, outcomes))


@pytest.mark.parametrize("parts", PARTS)
def test_backward_reads_what_was_assigned_to_data_behind_the_use(parts: str) -> None:
    here = data_behind.gradients(lambda model: distconv.in_turn(model, parts))
    assert is_same(*(({name: _values(x) for name, x in found.items()}) for found in (data_behind.gradients(), here)))


class OfThread(threading.local):
    """What a thread has locked, as of a library that makes files."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}


of_thread = OfThread()


class Locking(nn.Module):
    """Looks in its call at what its thread has locked."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * (1 + len(of_thread.held))


def test_parts_have_the_values_of_the_callers_thread() -> None:
    model, x = Locking(), torch.randn(1, 1, 8, 8)
    expected = model(x)
    distconv.in_turn(model, "height=2")
    assert torch.allclose(model(x), expected, atol=TOLERANCE)
    of_thread.held["file"] = 1
    try:
        assert torch.allclose(model(x), 2 * expected, atol=TOLERANCE)
        assert of_thread.held == {"file": 1}
    finally:
        of_thread.held.clear()
