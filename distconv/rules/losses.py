"""Losses over samples and space: sums over all shards, and means over the whole count.

A plain target of the whole shape counts as replicated: each rank reads its own part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.rules.decompositions import without_strategy
from distconv.rules.operands import part_of
from distconv.rules.operands.broadcasting import aligned
from distconv.rules.operands.layouts import common_layout
from distconv.rules.operands.sums import all_reduce
from distconv.rules.registry import above_autograd, rule
from distconv.rules.whole import whole_or_refused
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import Layout, dim_axes, local_box, local_shape, replicated
from distconv.tensors.mesh import sharded_dims
from distconv.tensors.refusal import refuse
from distconv.transfer.local_part import local_as

NONE, MEAN, SUM = 0, 1, 2  # aten's numbers of the reductions


def _axes(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    return [axis for axis, _ in sharded_dims(mesh, placements)]


def _weighted(weight: Tensor | None, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Tensor]:
    return [] if weight is None else [local_as(weight, mesh, placements)]


def _reduced(
    local: Tensor, shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement], reduction: int
) -> DTensor:
    """The loss of ``shape`` from this rank's part: its elements, or their sum here."""
    if reduction == NONE:
        return wrap(local, mesh, placements, shape)
    whole = all_reduce(local, mesh, _axes(mesh, placements))
    return wrap(whole / shape.numel() if reduction == MEAN else whole, mesh, replicated(mesh), ())


ELEMENTWISE = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")


@rule(*(f"aten::{name}" for name in ELEMENTWISE))
def loss(func: Any, x: Tensor, target: Tensor, *rest: Any) -> DTensor:
    """A loss per element, or their whole sum or mean."""
    weight, rest = (rest[0], rest[1:]) if "binary" in func._schema.name and rest else (None, rest)
    reduction, *more = rest or (MEAN,)
    if x.shape != target.shape:
        raise refuse(func, f"an input {tuple(x.shape)} with a target {tuple(target.shape)}")
    mesh, placements = common_layout(x, target, weight)
    tensors: list[Tensor | None] = [local_as(x, mesh, placements), local_as(target, mesh, placements)]
    tensors += [weight] if weight is None and "binary" in func._schema.name else _weighted(weight, mesh, placements)
    local = func(*tensors, NONE if reduction == NONE else SUM, *more)
    return _reduced(local, x.shape, mesh, placements, reduction)


@rule(*(f"aten::{name}_backward" for name in ELEMENTWISE))
def loss_backward(func: Any, grad: Tensor, x: Tensor, target: Tensor, *rest: Any) -> DTensor:
    """The gradient of x, laid out as x is."""
    binary = "binary" in func._schema.name
    weight, rest = (rest[0], rest[1:]) if binary and rest else (None, rest)
    reduction, *more = rest or (MEAN,)
    mesh, placements = common_layout(x, target, weight, grad)
    tensors: list[Tensor | None] = [local_as(x, mesh, placements), local_as(target, mesh, placements)]
    tensors += [weight] if weight is None and binary else _weighted(weight, mesh, placements)
    own = local_as(grad, mesh, placements if reduction == NONE else replicated(mesh))
    if reduction == MEAN:
        own = own / x.numel()
    return wrap(func(own, *tensors, NONE if reduction == NONE else SUM, *more), mesh, placements, x.shape)


@rule("aten::binary_cross_entropy_with_logits")
def logits_loss(
    func: Any,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = MEAN,
) -> DTensor:
    """Binary cross entropy of logits; weights broadcast. Its backward is made of elementwise operators."""
    mesh, placements = common_layout(x, target)
    if x.shape != target.shape:
        raise ValueError(f"Target size ({target.shape}) must be the same as input size ({x.shape})")
    weights = [None if w is None else aligned(w, mesh, placements, x.shape) for w in (weight, pos_weight)]
    local = func(
        local_as(x, mesh, placements), local_as(target, mesh, placements), *weights, NONE if reduction == NONE else SUM
    )
    return _reduced(local, x.shape, mesh, placements, reduction)


def _target_layout(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The layout of class numbers (N, spatial...) beside scores (N, C, spatial...)."""
    result: list[Placement] = []
    for placement in placements:
        dim = placement.dim if isinstance(placement, Shard) else 0
        result.append(Replicate() if dim == 1 else Shard(dim - 1) if dim else placement)
    return tuple(result)


def _flat(tensor: Tensor, channels: bool) -> Tensor:
    """(N, C, L, 1) or (N, L, 1): what the 2-D loss reads, of any number of spatial dims."""
    kept = tensor.shape[: 2 if channels else 1]
    return tensor.reshape(*kept, math.prod(tensor.shape[len(kept) :]), 1).contiguous()


IGNORED = -100
"""The class number of what another rank, or none, counts."""


def _own_classes(numbers: Tensor, ignore_index: int, own: tuple[int, int], classes: int) -> Tensor:
    """Class numbers counted from the first of this rank's classes; ``IGNORED`` for those of others.

    One that is no class stays none on every rank, so that the local operator refuses it: nobody waits to look at it.
    """
    used = numbers != ignore_index
    counted = torch.where((numbers >= own[0]) & (numbers < own[1]), numbers - own[0], IGNORED)
    counted = torch.where((numbers < 0) | (numbers >= classes), own[1] - own[0], counted)
    return torch.where(used, counted, IGNORED)


def _operands(
    func: Any, x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, *others: Any
) -> tuple[Layout, tuple[Placement, ...], tuple[Tensor, Tensor, Tensor | None], int]:
    """The layouts of scores and of class numbers, this rank's scores, numbers and weights, and the index to ignore."""
    mesh, placements = common_layout(x, target, *others)
    of_target = _target_layout(placements)
    if (x.shape[0], *x.shape[2:]) != tuple(target.shape):
        raise ValueError(f"{func}: scores {tuple(x.shape)} with class numbers {tuple(target.shape)}")
    scores, numbers = part_of(x, mesh, placements), part_of(target, mesh, of_target)
    if numbers.dtype == torch.uint8:  # which torch takes where there are no spatial dims
        numbers = numbers.long()
    weights = None if weight is None else local_as(weight, mesh, replicated(mesh))
    if dim_axes(mesh, placements, 1):
        own = local_box(mesh, placements, x.shape)[1]
        numbers = _own_classes(numbers, ignore_index, own, x.shape[1])
        weights, ignore_index = None if weights is None else weights[slice(*own)], IGNORED
    return (mesh, placements), of_target, (_flat(scores, True), _flat(numbers, False), weights), ignore_index


@rule("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll(
    func: Any, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[DTensor, DTensor]:
    """Negative log likelihood of class numbers, and the whole sum of their weights."""
    if x.dim() == 1:
        return whole_or_refused(func, (x, target, weight, reduction, ignore_index), {}, "of one sample")
    (mesh, placements), of_target, operands, ignore_index = _operands(func, x, target, weight, ignore_index)
    own, count = torch.ops.aten.nll_loss2d_forward(*operands, NONE if reduction == NONE else SUM, ignore_index)
    if reduction == NONE:
        losses = all_reduce(own, mesh, dim_axes(mesh, placements, 1))
        shape = local_shape(mesh, of_target, target.shape)
        return wrap(losses.reshape(shape), mesh, of_target, target.shape), wrap(count, mesh, replicated(mesh), ())
    whole, count = all_reduce(torch.stack([own, count]), mesh, _axes(mesh, placements)).unbind()
    if reduction == MEAN:
        whole = whole / count
    return wrap(whole.clone(), mesh, replicated(mesh), ()), wrap(count.clone(), mesh, replicated(mesh), ())


@rule("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_backward(
    func: Any,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> DTensor:
    """The gradient of the scores, laid out as they are."""
    if x.dim() == 1:
        given = (grad, x, target, weight, reduction, ignore_index, total_weight)
        return whole_or_refused(func, given, {}, "of one sample")
    (mesh, placements), of_target, operands, ignore_index = _operands(func, x, target, weight, ignore_index, grad)
    own = local_as(grad, mesh, of_target if reduction == NONE else replicated(mesh))
    dx = torch.ops.aten.nll_loss2d_backward(
        _flat(own, False) if reduction == NONE else own.contiguous(),
        *operands,
        reduction,
        ignore_index,
        local_as(total_weight, mesh, replicated(mesh)),
    )
    return wrap(dx.reshape(local_shape(mesh, placements, x.shape)), mesh, placements, x.shape)


class Nll(torch.autograd.Function):
    """The loss of scores with one, three or more spatial dims, which PyTorch would flatten across shards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int) -> DTensor:
        losses, count = nll("nll_loss", x, target, weight, reduction, ignore)
        ctx.save_for_backward(x, target, weight, count)
        ctx.options = reduction, ignore
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None, None, None, None]:
        x, target, weight, count = ctx.saved_tensors
        reduction, ignore = ctx.options
        return _NllGradient.apply(grad, x, target, weight, reduction, ignore, count), None, None, None, None


class _NllGradient(torch.autograd.Function):
    """The gradient of the scores, which is linear in that of the loss and does not depend on the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignore: int,
        count: Tensor,
    ) -> DTensor:
        ctx.save_for_backward(target, weight)
        ctx.options = reduction, ignore
        return nll_backward("nll_loss", grad, x, target, weight, reduction, ignore, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        target, weight = ctx.saved_tensors
        return Nll.apply(grad, target, weight, *ctx.options), *[None] * 6


@above_autograd("aten::nll_loss_nd")
def nll_of_any_dims(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Tensor:
    """The loss of scores with any number of spatial dims."""
    if isinstance(x, DTensor) and (x.dim() == 3 or x.dim() > 4):
        return Nll.apply(x, target, weight, reduction, ignore_index)
    return torch.ops.aten.nll_loss_nd.default.decompose(x, target, weight, reduction, ignore_index)


@rule("aten::multilabel_margin_loss_forward")
def multilabel_margin(func: Any, x: Tensor, target: Tensor, reduction: int) -> Any:
    """Taken apart as torch does, but for one sample, of which the parts would keep a dim."""
    if x.dim() < 2:
        return whole_or_refused(func, (x, target, reduction), {}, "of one sample")
    return without_strategy(func, (x, target, reduction), {})
