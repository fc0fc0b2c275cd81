"""Group normalization: a function of this rank's plain tensors, which combines the statistics of all ranks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.autocast import converts_operands
from distconv.model.direct.batch_norm import match_channels
from distconv.model.direct.parameters import operands
from distconv.model.direct.paths import path
from distconv.model.direct.where import Where
from distconv.rules.normalization.group import Groups, group_normalized, groups_of


@path(F.group_norm, parameters=True)
def group_norm_path(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """Statistics of each sample over groups of channels, and space of all ranks; parameters as modules have them."""
    if type(input) is not Activation or input.share is not None or converts_operands(input):
        return NotImplemented
    found = operands(weight, bias)
    if found is None:
        return NotImplemented
    place = input.place
    vectors, layouts = found
    key = "group_norm", num_groups, layouts
    groups = place.plans.get(key, False)
    if groups is False:
        groups = place.plans[key] = _plan(place, num_groups, *layouts)
    if groups is None:
        return NotImplemented
    return activation(group_normalized(input.local(), *vectors, groups, eps)[0], place)


def _plan(place: Where, num_groups: int, *vectors: Where | None) -> Groups | None:
    """None where parameters have other layouts, and where torch refuses a norm of such sizes."""
    if not match_channels(place, *vectors) or num_groups < 1 or place.shape[1] % num_groups:
        return None
    groups = groups_of(place.mesh, place.placements, tuple(place.shape), num_groups)
    return groups if groups.total > 1 else None
