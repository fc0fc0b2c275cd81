"""Segments that give up what they keep for backward: every one of them gives the numbers of plain torch."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from retained_models import MODELS, block
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import distconv
from distconv.fitting import moving
from distconv.fitting.following import followed
from distconv.fitting.retention import call_retaining, computed_again
from distconv.fitting.timeline import Timeline
from distconv.fitting.ways import AGAIN, SegmentWay, segment_options
from distconv.model.direct.chains.call import PRICES
from distconv.tensors.memory import TensorMemory
from distconv.turns.parameter_values import ParameterValues
from mucudnn.optimizer.retention import cheapest_retention, peak_of


class Alive(TorchDispatchMode):
    """The bytes of all tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.memory = TensorMemory()
        self.memory.count(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.memory.count(result)
        return result


def steps(model: nn.Module, x: Tensor, ways: list[SegmentWay]) -> list[Tensor]:
    """The result, gradients, buffers, counts and next random numbers of two steps of a copy of the model."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    for _ in range(2):
        y = call_retaining(nn.Module.__call__, model, x, ways=ways, device="cpu") if ways else model(x)
        y.square().sum().backward()
    calls = [torch.tensor(float(each.calls)) for each in model.modules() if hasattr(each, "calls")]
    gradients = [p.grad for p in (*model.parameters(), x) if p.grad is not None]
    return [y.detach(), *gradients, *model.buffers(), *calls, torch.rand(3)]


def peak(model: nn.Module, x: Tensor, ways: list[SegmentWay]) -> int:
    """The most bytes of a step."""
    model = copy.deepcopy(model)
    x = x.clone().requires_grad_()
    with Alive(*model.parameters(), *model.buffers(), x) as counted:
        y = call_retaining(nn.Module.__call__, model, x, ways=ways, device="cpu")
        (y * 1).sum().backward()  # as it is followed
    return counted.memory.peak


def follow(model: nn.Module, x: Tensor) -> Timeline:
    timeline = followed(model, (x.clone().requires_grad_(),), {}, True, PRICES["cpu"])
    timeline.scratch = [0] * len(timeline.scratch)
    return timeline


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float64) for name in MODELS), ("mixed", torch.float32)])
def test_each_segment_gives_the_numbers_of_plain_torch(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "USUAL", 0)
    torch.manual_seed(0)
    model, x = MODELS[name]().to(dtype), torch.randn(2, 4, 12, 12, dtype=dtype)
    expected = steps(model, x, [])
    ways, units, _ = segment_options(follow(model, x), 1e-9)
    own = [way.tag for way in ways if isinstance(way.tag, SegmentWay)]
    assert own
    for way in own:
        assert equal(steps(model, x, [way]), expected), way
    most = max(way.peak for way in ways)
    for share in (0.9, 0.7, 0.6):
        chosen = [
            way.tag for way in cheapest_retention(ways, units, share * most) or () if isinstance(way.tag, SegmentWay)
        ]
        assert equal(steps(model, x, chosen), expected), share
    if name == "impure":
        again = {way.segment for way in own if way.kind == AGAIN}
        assert not any(
            segment.module in ("", "body.0", "body.1", "body.2") for segment in again if not segment.children
        )


@pytest.mark.parametrize("name", ["blocks", "residual in place", "skips", "own function"])
def test_peaks_are_as_predicted(name: str) -> None:
    torch.manual_seed(0)
    make = MODELS.get(name, lambda: nn.Sequential(block(), block(inplace=False), block()))
    model, x = make().double(), torch.randn(2, 4, 64, 64, dtype=torch.float64)
    timeline = follow(model, x)
    whole = max(timeline.alive())
    assert abs(peak(model, x, []) - whole) <= 0.05 * whole
    ways, units, _ = segment_options(timeline, 1e-9)
    for share in (0.9, 0.8, 0.7, 0.6):
        chosen = cheapest_retention(ways, units, share * whole)
        if chosen is not None:
            own = [way.tag for way in chosen if isinstance(way.tag, SegmentWay)]
            assert -0.05 * whole <= peak_of(chosen) - peak(model, x, own) <= 0.1 * whole


def test_nothing_hands_parameters_out_while_they_are_watched() -> None:
    """They would be copied then, in the first calls of each kind, which takes as much memory as they do."""
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3)), torch.randn(2, 4, 64, 64)
    for each in segment_options(follow(model, x), 1e-9)[0]:
        if isinstance(each.tag, SegmentWay):
            values = ParameterValues(model.named_parameters(), 1)
            with values.watch():
                call_retaining(nn.Module.__call__, model, x, ways=[each.tag], device="cpu")
            assert not values._values, each.tag


def test_parts_hand_no_parameters_out_while_they_are_watched() -> None:
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()), torch.randn(2, 4, 64, 64)
    values = ParameterValues(model.named_parameters(), 1)
    distconv.in_turn(model, "height=2", memory="1MiB")
    with values.watch():
        model(x)
    assert not values._values


@pytest.mark.parametrize("way", [0, 1], ids=["computed again", "moved"])
@pytest.mark.parametrize("changed", ["parameter", "input"])
def test_what_is_changed_before_backward_is_refused_as_in_plain_torch(
    way: int, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "USUAL", 0)
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3)), torch.randn(2, 4, 12, 12)
    ways, *_ = segment_options(follow(model, x), 1e-9)
    own = [each.tag for each in ways if isinstance(each.tag, SegmentWay)]
    chosen = next(each for each in own if (each.kind == AGAIN) == (way == 0) and each.segment.module == "")
    y = call_retaining(nn.Module.__call__, model, x, ways=[chosen], device="cpu")
    with torch.no_grad():
        (model[2].weight if changed == "parameter" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("change", ["another memory", "in its memory", "and back"])
def test_a_parameter_whose_data_is_changed_before_backward_is_refused_unless_it_is_changed_back(change: str) -> None:
    found = []
    for is_again in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3)).double()
        x, weight = torch.randn(2, 4, 12, 12, dtype=torch.float64), model[2].weight
        y = computed_again(model, [model], [], (x,), {}) if is_again else model(x)
        before = weight.data
        if change == "in its memory":
            weight.data.mul_(2)
        else:
            weight.data = before * 2
            model(x)
        if change == "and back":
            weight.data = before
        elif is_again:
            with pytest.raises(RuntimeError, match="has been given other values by its"):
                y.square().sum().backward()
            return
        y.square().sum().backward()
        found.append(model[0].weight.grad)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_a_graph_is_differentiated_twice_and_again() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh()), torch.randn(2, 4, 64, 64)
    ways, *_ = segment_options(follow(model, x), 1e-9)

    def found(chosen: list[SegmentWay]) -> list[Tensor]:
        model.zero_grad()
        y = call_retaining(nn.Module.__call__, model, x, ways=chosen, device="cpu")
        y.sum().backward(retain_graph=True)
        y.square().sum().backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(y.sum(), model[0].weight, create_graph=True)
        gradient.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = found([])
    for way in (each.tag for each in ways if isinstance(each.tag, SegmentWay)):
        assert equal(found([way]), expected), way


def test_a_segment_that_changes_something_else_than_it_did_is_refused() -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            if is_counted:
                self.mean.add_(x.detach().mean((0, 2, 3))[:, None, None])
            return torch.tanh(torch.sigmoid(x * 2) - self.mean)

    is_counted = False
    model, x = nn.Sequential(nn.Conv2d(4, 4, 1), Switched()), torch.randn(2, 4, 64, 64)
    ways = [each.tag for each in segment_options(follow(model, x), 1e-9)[0] if isinstance(each.tag, SegmentWay)]
    way = next(way for way in ways if way.kind == AGAIN)
    is_counted = True
    with pytest.raises(RuntimeError, match=r"has changed .*mean, which it had not when its model was followed"):
        call_retaining(nn.Module.__call__, model, x, ways=[way], device="cpu")
