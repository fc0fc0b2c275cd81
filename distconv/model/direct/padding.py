"""Padding in the direct path, with zeros or with elements of the tensor itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F

from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.paths import path
from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.rules.views.padding import PaddingPlan, check_padding, padded, padding_plan


@path(F.pad)
def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Pads the last dims. Numbers may be negative, which crops; not all may be zero."""
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


def _plan(place: ShapedLayout, mode: str, pad: tuple[int, ...]) -> tuple[PaddingPlan, ShapedLayout]:
    """The plan, and the layout of its result. Raises what one process raises for these arguments."""
    check_padding(mode, place.shape, pad, 0)
    plan = padding_plan(place.mesh, place.placements, tuple(place.shape), mode, pad)
    return plan, place.of_shape(plan.shape)
