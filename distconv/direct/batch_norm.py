"""Batch normalization: a function of distconv in training, torch's own in evaluation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Placement

from distconv.direct.activation import Activation, activation, is_parameter
from distconv.direct.border import apply
from distconv.direct.paths import path
from distconv.direct.positionwise import computed
from distconv.direct.where import Where
from distconv.rules.normalization.batch import batch_share
from distconv.rules.normalization.combining import (
    Share,
    of_all,
)
from distconv.rules.normalization.gradient import batch_norm_gradients
from distconv.rules.normalization.moments import (
    moments,
)
from distconv.rules.normalization.running import can_wait, combine_later, move_later
from distconv.rules.normalization.statistics import (
    normalize,
    normalize_backward,
    vector_layout,
)
from distconv.tensors.layouts import dim_axes
from distconv.tensors.mesh_options import batch_norm_statistics


class _Call(NamedTuple):
    """The decisions of a batch norm for given shapes."""

    place: Where
    axes: tuple[int, ...]
    """Those that shard the channels."""
    whole: Share | None
    """The ranks among which the elements of a channel lie, whose statistics the running ones follow."""
    share: Share | None
    """Those by whose elements this rank normalizes: the same, or none but itself."""
    total: int
    """Elements of a channel by which it normalizes."""


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        kept: tuple[Tensor, Tensor] | None,
        momentum: float,
        eps: float,
        call: _Call,
    ) -> Tensor:
        mean, variance = moments(x)
        place, axes, whole, share, total = call
        if share is not None:
            mean, variance = of_all(mean, variance, share)
        if kept is not None and share is not whole:
            assert whole is not None
            combine_later(kept, mean, variance, whole, place.mesh, axes, momentum)
        elif kept is not None:
            move_later(kept[0], mean, place.mesh, axes, momentum)
            move_later(kept[1], variance, place.mesh, axes, momentum, total / max(total - 1, 1))
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.call, ctx.eps = call, eps
        return normalize(x, mean, variance, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        _, _, _, share, total = ctx.call
        mask, eps = ctx.needs_input_grad, ctx.eps
        if torch.is_grad_enabled():
            found = batch_norm_gradients(grad, x, weight, share, eps, None)
            return *(each if wanted else None for each, wanted in zip(found, mask, strict=False)), *[None] * 4
        dtype = mean.dtype if weight is None else weight.dtype
        own = weight if weight is None or dtype is mean.dtype else weight.to(mean.dtype)
        dx, dweight, dbias = normalize_backward(grad, x, mean, variance, own, share, total, None, mask[0], eps)
        if dtype is not dweight.dtype:
            dweight, dbias = dweight.to(dtype), dbias.to(dtype)
        return dx, dweight if mask[1] else None, dbias if mask[2] else None, None, None, None, None


@path(F.batch_norm)
def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Statistics over samples and space of all ranks; parameters and running statistics as modules hold them."""
    if type(input) is not Activation or input.share is not None or torch._C._is_any_autocast_enabled():
        return NotImplemented
    if not ((weight is None or is_parameter(weight)) and (bias is None or is_parameter(bias))):
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
    key = "batch_norm", own, None if weight is None else weight._place, None if bias is None else bias._place
    call = place.plans.get(key, False)
    if call is False:
        call = place.plans[key] = _call(place, own, weight, bias)
    if call is None or not (kept is None or _fit(kept, place.shape[1])):
        return NotImplemented
    operands = input.local(), None if weight is None else weight.local(), None if bias is None else bias.local()
    if not training:
        if call.axes or kept is None or not place.is_filled:
            return NotImplemented
        if place.is_thin and operands[0].requires_grad and operands[0].dim() > 2:
            return NotImplemented  # torch's backward may mix elements up, see `alike`
        rest = *kept, *operands[1:], False, momentum, eps
        return computed(lambda own: F.batch_norm(own, *rest), (input,), place)
    if call.total <= 1:
        return NotImplemented  # one element a channel is refused there
    return activation(apply(_BatchNorm, *operands, kept, momentum, eps, call), place)


def _fit(kept: tuple[Any, Any], channels: int) -> bool:
    """Whether running statistics are plain, and one number per channel."""
    mean, variance = kept
    return type(mean) is Tensor and type(variance) is Tensor and mean.shape == variance.shape == (channels,)


def _call(place: Where, own: bool, *vectors: Any) -> _Call | None:
    """None unless the parameters have a number for each of this rank's channels, and nobody else counts the same."""
    if not place.is_spread or len(place.shape) < 2:
        return None
    wanted = _shards(place, vector_layout(place.placements))
    for vector in vectors:
        if vector is None:
            continue
        lies = vector._place
        if lies.mesh != place.mesh or lies.shape != place.shape[1:2] or _shards(place, lies.placements) != wanted:
            return None
    share = batch_share(place.mesh, place.placements, place.shape)
    axes = dim_axes(place.mesh, place.placements, 1)
    if own and share is not None:
        return _Call(place, axes, share, None, share.counts[share.here][0])
    return _Call(place, axes, share, share, place.shape.numel() // max(place.shape[1], 1))


def _shards(place: Where, placements: tuple[Placement, ...]) -> list[Placement]:
    """Along the axes of more than one rank."""
    return [placement for axis, placement in enumerate(placements) if place.mesh.size(axis) > 1]
