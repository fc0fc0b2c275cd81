"""Autograd's functions from this rank's plain tensor to the DTensor, and back, and gradients of parameters as shares.

The shares of all ranks that have a parameter add up to its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from distconv.model.direct.shaped_layout import ShapedLayout, shaped_layout
from distconv.rules.operands.own_parts import apply as apply
from distconv.rules.operands.own_parts import derivable
from distconv.rules.whole.copies import watch_changes
from distconv.settings.partition import ownership
from distconv.tensors.autograd_nodes import GIVEN_RESULTS, LAYOUT_CHANGES, PARAMETER_USES
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import local_shape, replicated, undoes_shard
from distconv.tensors.refusal import UnsupportedOperation
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import redistributed, redistributed_data


@PARAMETER_USES
class _Use(torch.autograd.Function):
    """The DTensor of a parameter. Its backward gives this rank's share of the gradient."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, place: ShapedLayout) -> DTensor:
        ctx.place = place
        ctx.set_materialize_grads(False)  # a parameter without a gradient has None, as in one process
        return derivable(wrap(root.detach(), place.mesh, place.placements, place.shape))

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else share(grad, ctx.place), None


class _Share(torch.autograd.Function):
    """This rank's share of a parameter's gradient. Its backward gives a gradient in the layout of the parameter."""

    @staticmethod
    def forward(ctx: Any, grad: DTensor, place: ShapedLayout) -> Tensor:
        ctx.place = place
        return share_of(grad, place).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        return use(grad, ctx.place), None


def use(root: Tensor, place: ShapedLayout) -> DTensor:
    """The DTensor of a parameter in this layout."""
    return apply(_Use, root, place)


def share(grad: Tensor, place: ShapedLayout) -> Tensor:
    """As `share_of`, but differentiable if autograd records backward."""
    if not isinstance(grad, DTensor):  # autograd has made plain zeros
        grad = wrap(grad, place.mesh, replicated(place.mesh), place.shape)
    return apply(_Share, grad, place) if torch.is_grad_enabled() else share_of(grad, place)


def share_of(grad: DTensor, place: ShapedLayout) -> Tensor:
    """This rank's share of a parameter's gradient."""
    grad = as_sharded(grad, place.placements)
    local = grad._local_tensor
    if not any(
        isinstance(found, Shard) and not own.is_shard()
        for found, own in zip(grad.placements, place.placements, strict=True)
    ):
        return local if counted_part(grad, place, local) is not None else torch.zeros_like(local)
    share = local.new_zeros(local_shape(place.mesh, place.placements, place.shape))
    part = counted_part(grad, place, share)
    if part is not None:
        part.copy_(local)
    return share


def counted_part(grad: DTensor, place: ShapedLayout, slot: Tensor) -> Tensor | None:
    """The region of ``slot``, in the shape of a rank's part of a parameter, that its share of a gradient fills. None if
    the gradient is replicated, and another rank's share counts."""
    mesh, part, counted = place.mesh, slot, True
    for axis, (found, own) in enumerate(zip(grad.placements, place.placements, strict=True)):
        if own.is_shard():
            continue
        coordinate = mesh.get_local_rank(axis)
        if isinstance(found, Shard):
            start, stop = ownership(part.shape[found.dim], mesh.size(axis))[coordinate]
            part = part.narrow(found.dim, start, stop - start)
        elif found.is_replicate():
            counted = counted and coordinate == 0
        elif not found.is_partial("sum"):
            raise UnsupportedOperation(f"the gradient of a parameter is laid out as {grad.placements}")
    return part if counted else None


def as_sharded(grad: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """A gradient in a layout that shards what its parameter shards; redistributed if a rule has left it in another."""
    dims = [placement.dim for placement in placements if isinstance(placement, Shard)]
    fits = all(
        found == own if own.is_shard() else not (isinstance(found, Shard) and found.dim in dims)
        for found, own in zip(grad.placements, placements, strict=True)
    )
    return grad if fits else redistributed_data(grad, grad.device_mesh, placements)


def fitting(grad: Tensor, place: ShapedLayout) -> DTensor:
    """A gradient in the layout of its tensor. Differentiable; collective if it must be redistributed."""
    if isinstance(grad, DTensor) and tuple(grad.placements) == place.placements:
        return grad
    if torch.is_grad_enabled() and isinstance(grad, DTensor):
        return redistributed(grad, place.mesh, place.placements)
    return wrap(own_part(grad, place), place.mesh, place.placements, place.shape)


def own_part(grad: Tensor, place: ShapedLayout) -> Tensor:
    """This rank's part of the gradient of an activation; may be a view. Collective if it must be redistributed."""
    if isinstance(grad, DTensor) and undoes_shard(place.mesh, grad.placements, place.placements):
        return redistributed_data(grad, place.mesh, place.placements)._local_tensor
    return local_as(grad, place.mesh, place.placements)


@LAYOUT_CHANGES
@GIVEN_RESULTS
class FromRoot(torch.autograd.Function):
    """The DTensor of this rank's part."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, place: ShapedLayout) -> DTensor:
        ctx.place = place
        watch_changes()
        return wrap(root.detach(), place.mesh, place.placements, place.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            return apply(ToRoot, fitting(grad, ctx.place)), None
        return own_part(grad, ctx.place), None


class ToRoot(torch.autograd.Function):
    """This rank's part of a DTensor."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor) -> Tensor:
        spec = dtensor._spec
        ctx.place = shaped_layout(spec.mesh, tuple(spec.placements), spec.shape)
        return dtensor._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        place = ctx.place
        if torch.is_grad_enabled():
            return apply(FromRoot, grad, place)
        return wrap(grad, place.mesh, place.placements, place.shape)
