"""Which calls of a model are of one kind."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import distconv
from distconv.fitting.called import Call
from distconv.fitting.choice import Fit
from distconv.fitting.kinds import EXACT, MOST, CallKind, kind_of_call, known_of_larger
from distconv.fitting.models import Fitting
from distconv.fitting.timeline import Segment, Timeline
from distconv.fitting.ways import AGAIN, SegmentWay
from distconv.turns.computation import Computation
from distconv.turns.methods import forward_replaced


def kind(*args: Any, known: int = 0, **kwargs: Any) -> CallKind:
    return kind_of_call(nn.Linear(2, 2), args, kwargs, [torch.ones(2, 2)], known)


def test_floats_are_known_by_their_type_and_integers_while_there_are_few_kinds() -> None:
    assert kind(0.5) == kind(0.7) != kind(1) != kind(2)
    assert kind(True) != kind(1) and kind(True) != kind(False) and kind(mode="a") != kind(mode="b")
    assert kind(1, known=EXACT) == kind(2, known=EXACT) != kind(0.5, known=EXACT)
    assert kind(True, known=EXACT) != kind(False, known=EXACT)


def test_a_method_in_place_of_forward_makes_another_kind() -> None:
    model, x = nn.Linear(2, 2), torch.ones(2, 2)
    kinds = [kind_of_call(model, (x,), {}, [x], 0)]
    for method in (nn.Linear.extra_repr, nn.Linear.reset_parameters, nn.Linear.extra_repr):
        with forward_replaced(model, functools.partial(method, model)):
            kinds.append(kind_of_call(model, (x,), {}, [x], 0))
    assert kinds[1] == kinds[3] and len(set(kinds)) == 3


def test_a_larger_call_is_one_whose_tensors_are_as_large_in_each_dim() -> None:
    known = {CallKind((), (torch.Size(size),)): size for size in ((4, 8), (8, 8), (9, 4), (1, 9))}
    assert known_of_larger(CallKind((), (torch.Size((4, 6)),)), known) == [(4, 8), (8, 8)]
    assert known_of_larger(CallKind((), (torch.Size((1, 8)),)), known) == [(1, 9)]
    assert not known_of_larger(CallKind((True,), (torch.Size((4, 6)),)), known)


@pytest.mark.parametrize(("slower", "asked"), [(1.0, 1), (1.2, EXACT)])
def test_how_many_calls_of_many_sizes_are_followed(slower: float, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def ways(*args: Any) -> list[Fit]:
        found.append(args)
        return [Fit(0, slower, ways=(SegmentWay(Segment("", 0), AGAIN, ()),) * (slower > 1))]

    monkeypatch.setattr(Fitting, "_ways", ways)
    monkeypatch.setattr(Call, "timeline", lambda *call: Timeline())
    monkeypatch.setattr("distconv.fitting.models.computation_of", lambda fit, device: Computation())
    model = distconv.fit(nn.Conv2d(1, 1, 3), "1MiB")
    for extent in range(20 + MOST, 20, -1):
        model(torch.ones(1, 1, extent, extent))
    assert len(found) == asked


def test_what_is_chosen_anew_for_smaller_inputs_leaves_the_choice_for_larger_ones() -> None:
    model, fitting = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()), Fitting("1GiB")
    inputs = [torch.randn(1, 2, extent, extent) for extent in (64, 32)]
    larger, smaller = (fitting(model, (x,), {}, [x], "cpu") for x in inputs)
    first, second = fitting._known[model].values()
    before = first.fit
    assert second.fit == before and larger.smaller is not None and smaller.smaller is not None
    smaller.smaller("out of memory")
    assert first.fit is before and second.fit != before
