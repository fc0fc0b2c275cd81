"""Gradients of parameters as shares: the shares of all ranks that have the parameter add up to the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from distconv.model.direct.border import apply
from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.rules.operands.derived import derivable
from distconv.settings.partition import ownership
from distconv.tensors.autograd_nodes import PARAMETER_USES
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import local_shape, replicated
from distconv.tensors.refusal import UnsupportedOperation
from distconv.transfer.redistribution import redistributed_data


@PARAMETER_USES
class _Use(torch.autograd.Function):
    """The DTensor of a parameter. Its backward gives this rank's share of the gradient."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, place: ShapedLayout) -> DTensor:
        ctx.place = place
        return derivable(wrap(root.detach(), place.mesh, place.placements, place.shape))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        return share(grad, ctx.place), None


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
