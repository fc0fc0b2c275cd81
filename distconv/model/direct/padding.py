"""Padding with zeros or with elements of the tensor itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F

from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.paths import path
from distconv.model.direct.where import Where
from distconv.rules.views.padding import PaddingPlan, check_padding, padded, padding_plan


@path(F.pad)
def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Of the last dims, by numbers that may be negative (a crop) but are not all zero."""
    if type(input) is not Activation or input.share is not None or not input.place.is_plain:
        return NotImplemented
    if value or not any(pad) or not all(type(count) is int for count in pad):
        return NotImplemented
    place = input.place
    key = "pad", mode, tuple(pad)
    known = place.plans.get(key)
    if known is None:
        known = place.plans[key] = _plan(place, mode, tuple(pad))
    plan, to = known
    return activation(padded(input.local(), plan, mode), to)


def _plan(place: Where, mode: str, pad: tuple[int, ...]) -> tuple[PaddingPlan, Where]:
    """The plan, and the layout of its result. Raises what one process raises for these arguments."""
    check_padding(mode, place.shape, pad, 0)
    plan = padding_plan(place.mesh, place.placements, tuple(place.shape), mode, pad)
    return plan, place.of_shape(plan.shape)
