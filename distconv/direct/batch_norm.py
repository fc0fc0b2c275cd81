"""Batch normalization: one function of ours in training, torch's own in evaluation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Placement

from distconv.direct.activation import Activation, activation, is_parameter
from distconv.direct.border import apply
from distconv.direct.paths import path, running
from distconv.direct.shares import again
from distconv.direct.where import Where, where
from distconv.mesh_options import batch_norm_statistics
from distconv.rules.normalization.batch import batch_share
from distconv.rules.normalization.statistics import (
    combined,
    count,
    moments,
    normalize,
    normalize_backward,
    update_running,
    vector_layout,
)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        kept: list[Tensor],
        momentum: float,
        eps: float,
        place: Where,
        share: Any,
    ) -> Tensor:
        mean, variance = moments(x)
        total = count(x)
        if share is not None:
            mean, variance = combined(mean, variance * total, share)
            total = share.total
        if kept:
            values = mean, variance * (total / max(total - 1, 1))
            update_running(kept, values, place.mesh, place.placements, place.shape[1], momentum)
        square = variance + eps
        ctx.save_for_backward(x, weight, mean, square)
        ctx.call = place, share, total, eps
        return normalize(x, mean, square, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, mean, square = ctx.saved_tensors
        place, share, total, eps = ctx.call
        mask = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            vector = where(place.mesh, vector_layout(place.placements), place.shape[1:2])
            operands = (grad, place, False), (x, place, False), (weight, vector, True)
            saved = (mean, vector, False), (torch.rsqrt(square), vector, False)
            empty = (None, vector, False)
            function = torch.ops.aten.native_batch_norm_backward
            return *again(function, (*operands, empty, empty, *saved), (True, eps, list(mask)), vector), *[None] * 5
        own = weight if weight is None else weight.to(mean.dtype)
        dx, dweight, dbias = normalize_backward(grad, x, mean, square, own, share, total, None, mask[0])
        dtype = mean.dtype if weight is None else weight.dtype
        return dx, dweight.to(dtype) if mask[1] else None, dbias.to(dtype) if mask[2] else None, *[None] * 5


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
    place = input.place
    if not all(vector is None or is_parameter(vector) for vector in (weight, bias)):
        return NotImplemented
    for buffer in (running_mean, running_var):
        if (buffer is None) != (running_mean is None) or not (buffer is None or id(buffer) in running.buffers):
            return NotImplemented
    key = ("batch_norm", *(None if vector is None else vector._place for vector in (weight, bias)))
    fits = place.plans.get(key)
    if fits is None:
        fits = place.plans[key] = _fits(place, weight, bias)
    if not fits:
        return NotImplemented
    own_weight, own_bias = (None if vector is None else vector.local() for vector in (weight, bias))
    channels = place.shape[1]
    kept = [] if running_mean is None else [running_mean, running_var]
    if any(type(buffer) is not Tensor or buffer.shape != (channels,) for buffer in kept):
        return NotImplemented
    if not training:
        if place.shards(1) or not kept or not place.is_filled:
            return NotImplemented
        y = F.batch_norm(input.local(), running_mean, running_var, own_weight, own_bias, False, momentum, eps)
        return activation(y, place)
    if batch_norm_statistics.get(place.mesh) == "local":
        return NotImplemented
    share = batch_share(place.mesh, place.placements, place.shape)
    if place.shape.numel() == channels:
        return NotImplemented  # which refuses it
    y = apply(_BatchNorm, input.local(), own_weight, own_bias, kept, momentum, eps, place, share)
    return activation(y, place)


def _fits(place: Where, *vectors: Any) -> bool:
    """Whether the parameters have a number for each of this rank's channels, and nobody else counts the same twice."""
    if not place.is_spread or len(place.shape) < 2:
        return False
    wanted = _shards(place, vector_layout(place.placements))
    return all(
        vector is None
        or (
            (vector._place.mesh == place.mesh and vector._place.shape == place.shape[1:2])
            and _shards(place, vector._place.placements) == wanted
        )
        for vector in vectors
    )


def _shards(place: Where, placements: tuple[Placement, ...]) -> list[Placement]:
    """Along the axes of more than one rank."""
    return [placement for axis, placement in enumerate(placements) if place.mesh.size(axis) > 1]
