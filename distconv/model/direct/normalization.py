"""Batch and group normalization in the direct path: distconv's functions; for batch norm in evaluation torch's own."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.operands import converts_operands, operands
from distconv.model.direct.paths import layer, path
from distconv.model.direct.pointwise import computed
from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.rules.normalization.batch import batch_normalized, batch_plan
from distconv.rules.normalization.group import Groups, group_normalized, groups_of
from distconv.rules.normalization.running import can_wait, count
from distconv.rules.normalization.shares import vector_layout
from distconv.tensors.mesh import batch_norm_statistics


@path(F.batch_norm, parameters=True)
def batch_norm_path(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Computes statistics over the samples and space of all ranks. Takes parameters as modules pass them."""
    if type(input) is not Activation or input.share is not None or converts_operands(input):
        return NotImplemented
    if running_mean is None:
        if running_var is not None:
            return NotImplemented
        kept = None
    else:
        kept = running_mean, running_var
        if not can_wait(kept):
            return NotImplemented
    place = input.place
    own = batch_norm_statistics.get(place.mesh) == "local"
    found = operands(weight, bias)
    if found is None:
        return NotImplemented
    layouts = found[0].place, found[1].place
    key = "batch_norm", own, layouts
    plan = place.plans.get(key, False)
    if plan is False:
        fits = match_channels(place, *layouts)
        plan = batch_plan(place.mesh, place.placements, tuple(place.shape), own) if fits else None
        place.plans[key] = plan
    if plan is None or not (kept is None or _fit(kept, place.shape[1])):
        return NotImplemented
    x = input.local()
    if not training:
        if plan.axes or kept is None or not place.is_filled:
            return NotImplemented
        if place.is_thin and x.requires_grad and x.dim() > 2:
            return NotImplemented  # torch's backward may confuse elements, see `in_same_order`
        rest = *kept, found[0].root, found[1].root, False, momentum, eps
        return computed(lambda own: F.batch_norm(own, *rest), (input,), place)
    if plan.over.total <= 1:
        return NotImplemented  # one element a channel: the other path raises torch's error
    (w, take_w), (b, take_b) = found[0].handed(), found[1].handed()
    y = batch_normalized(x, w, b, kept or (None, None), momentum, eps, plan, (take_w, take_b))
    return activation(y, place)


@layer("batch_norm", "_check_input_dim", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _normalized(normalize: Any, module: Any, x: Activation) -> Any:
    parameters, buffers = module._parameters, module._buffers
    batches = buffers.get("num_batches_tracked")
    if not (module.training and module.track_running_stats and module.momentum is not None and type(batches) is Tensor):
        return NotImplemented
    if "weight" not in parameters or "bias" not in parameters or "running_mean" not in buffers:
        return NotImplemented
    module._check_input_dim(x)
    count(batches)  # first, as torch does: a checkpoint that computes again may stop in the norm
    # Not `buffers[...]`, which writes what waits to be written, though nothing reads it here.
    statistics = buffers.get("running_mean"), buffers.get("running_var")
    given = x, *statistics, parameters["weight"], parameters["bias"], True, module.momentum, module.eps
    result = normalize(*given)
    return F.batch_norm(*given) if result is NotImplemented else result


def _fit(kept: tuple[Any, Any], channels: int) -> bool:
    """Whether running statistics are plain, and one number per channel."""
    mean, variance = kept
    return type(mean) is Tensor and type(variance) is Tensor and mean.shape == variance.shape == (channels,)


def match_channels(place: ShapedLayout, *vectors: ShapedLayout | None) -> bool:
    """Whether these layouts give this rank a number for each of its channels, and no other rank the same elements."""
    if not place.is_spread or len(place.shape) < 2:
        return False
    wanted = vector_layout(place.placements)
    return all(
        at is None or (at.mesh == place.mesh and at.shape == place.shape[1:2] and at.has_parts_of(wanted))
        for at in vectors
    )


@path(F.group_norm, parameters=True)
def group_norm_path(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """Computes statistics of each sample over groups of channels and the space of all ranks."""
    if type(input) is not Activation or input.share is not None or converts_operands(input):
        return NotImplemented
    found = operands(weight, bias)
    if found is None:
        return NotImplemented
    place = input.place
    layouts = found[0].place, found[1].place
    key = "group_norm", num_groups, layouts
    groups = place.plans.get(key, False)
    if groups is False:
        groups = place.plans[key] = _plan(place, num_groups, *layouts)
    if groups is None:
        return NotImplemented
    return activation(group_normalized(input.local(), found[0].root, found[1].root, groups, eps)[0], place)


def _plan(place: ShapedLayout, num_groups: int, *vectors: ShapedLayout | None) -> Groups | None:
    """None if the parameters have other layouts, or torch refuses a norm of such sizes."""
    if not match_channels(place, *vectors) or num_groups < 1 or place.shape[1] % num_groups:
        return None
    groups = groups_of(place.mesh, place.placements, tuple(place.shape), num_groups)
    return groups if groups.total > 1 else None
