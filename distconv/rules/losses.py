"""Losses over samples and space: sums over all shards, and means over the whole count.

A plain target of the whole shape counts as replicated: each rank reads its own part of it. A rank sums up the losses of
its own elements by torch's operator, whose gradient is that of these elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from distconv.rules.operands.layouts import broadcast_layout, common_layout, part_of, reduced_layout
from distconv.rules.operands.own_parts import Added, apply, as_own_part, wrapped
from distconv.rules.registry import above_autograd, rule
from distconv.rules.schemas import named_arguments, operator
from distconv.rules.stock import without_strategy
from distconv.rules.whole import whole_or_refused
from distconv.tensors.layouts import dim_axes, local_box, local_shape, replicated
from distconv.tensors.mesh import sharded_dims
from distconv.tensors.refusal import refuse
from distconv.transfer.local_part import local_as

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # aten's numbers of the reductions


def _sum(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """The sum of what the ranks have of a tensor in this layout."""
    return apply(Added, local, mesh, tuple(axis for axis, _ in sharded_dims(mesh, placements)))


ELEMENTWISE = (
    *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"),
    "binary_cross_entropy_with_logits",
)


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A loss per element, or their whole sum or mean; weights broadcast."""
    given = named_arguments(func, args, kwargs)
    x, target, reduction = given["self"], given["target"], given["reduction"]
    if x.shape != target.shape:
        raise refuse(func, f"an input {tuple(x.shape)} with a target {tuple(target.shape)}")
    mesh, placements = common_layout(x, target, given.get("weight"))
    own = {
        name: as_own_part(value, mesh, broadcast_layout(value.shape, placements, x.shape))
        for name, value in given.items()
        if isinstance(value, Tensor)
    }
    local = func(**given | own | {"reduction": NONE if reduction == NONE else SUM})
    if reduction == NONE:
        return wrapped(local, mesh, placements, x.shape)
    whole = _sum(local, mesh, placements)
    return wrapped(whole / x.numel() if reduction == MEAN else whole, mesh, replicated(mesh), ())


for _name in ELEMENTWISE:
    above_autograd(f"aten::{_name}")(functools.partial(_elementwise, operator(_name)))


def _flat(tensor: Tensor, channels: bool) -> Tensor:
    """(N, C, L, 1) or (N, L, 1): what the 2-D loss reads, of any number of spatial dims."""
    kept = tensor.shape[: 2 if channels else 1]
    return tensor.reshape(*kept, math.prod(tensor.shape[len(kept) :]), 1).contiguous()


IGNORED = -100  # The class number of what another rank, or none, counts.


def _own_classes(numbers: Tensor, ignore_index: int, own: tuple[int, int], classes: int) -> Tensor:
    """Class numbers counted from the first of this rank's classes; ``IGNORED`` for those of others.

    One that is no class stays none on every rank, so that the local operator refuses it: nobody waits to look at it.
    """
    used = numbers != ignore_index
    counted = torch.where((numbers >= own[0]) & (numbers < own[1]), numbers - own[0], IGNORED)
    counted = torch.where((numbers < 0) | (numbers >= classes), own[1] - own[0], counted)
    return torch.where(used, counted, IGNORED)


@above_autograd("aten::nll_loss")
@above_autograd("aten::nll_loss2d")
@above_autograd("aten::nll_loss_nd")
def nll(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Tensor:
    """Negative log likelihood of class numbers, of scores with any number of spatial dims."""
    if x.dim() == 1:
        losses = nll(x[None], target[None], weight, reduction, ignore_index)
        return losses[0] if reduction == NONE else losses
    if (x.shape[0], *x.shape[2:]) != tuple(target.shape):
        raise ValueError(f"nll_loss: scores {tuple(x.shape)} with class numbers {tuple(target.shape)}")
    mesh, placements = common_layout(x, target)
    of_target = reduced_layout(placements, [1], False, Replicate())  # class numbers (N, spatial...)
    scores, numbers = as_own_part(x, mesh, placements), part_of(target, mesh, of_target)
    if numbers.dtype == torch.uint8:  # which torch takes where there are no spatial dims
        numbers = numbers.long()
    weights = None if weight is None else local_as(weight, mesh, replicated(mesh))
    classes = dim_axes(mesh, placements, 1)
    if classes:
        own = local_box(mesh, placements, x.shape)[1]
        numbers = _own_classes(numbers, ignore_index, own, x.shape[1])
        weights, ignore_index = None if weights is None else weights[slice(*own)], IGNORED
    each = NONE if reduction == NONE else SUM
    local, count = aten.nll_loss2d_forward(_flat(scores, True), _flat(numbers, False), weights, each, ignore_index)
    if reduction == NONE:
        losses = apply(Added, local, mesh, classes).reshape(local_shape(mesh, of_target, target.shape))
        return wrapped(losses, mesh, of_target, target.shape)
    whole, count = _sum(torch.stack([local, count]), mesh, placements).unbind()
    return wrapped(whole / count.detach() if reduction == MEAN else whole, mesh, replicated(mesh), ())


@rule("aten::multilabel_margin_loss_forward")
def multilabel_margin(func: Any, x: Tensor, target: Tensor, reduction: int) -> Any:
    """Taken apart as torch does, but for one sample, of which the parts would keep a dim."""
    if x.dim() < 2:
        return whole_or_refused(func, (x, target, reduction), {}, "of one sample")
    return without_strategy(func, (x, target, reduction), {})
