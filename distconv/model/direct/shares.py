"""Gradients of parameters as shares: those of all ranks that have the parameter add up to the whole gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from distconv.model.direct.border import apply
from distconv.model.direct.where import Where
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
    def forward(ctx: Any, root: Tensor, place: Where) -> DTensor:
        ctx.where = place
        return derivable(wrap(root.detach(), place.mesh, place.placements, place.shape))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        return share(grad, ctx.where), None


class _Share(torch.autograd.Function):
    """This rank's share of a parameter's gradient. Its backward gives a gradient in the layout of the parameter."""

    @staticmethod
    def forward(ctx: Any, grad: DTensor, place: Where) -> Tensor:
        ctx.where = place
        return share_of(grad, place).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        return use(grad, ctx.where), None


def use(root: Tensor, place: Where) -> DTensor:
    """The DTensor of a parameter in this layout."""
    return apply(_Use, root, place)


def share(grad: Tensor, place: Where) -> Tensor:
    """As `share_of`, differentiable where autograd records a backward. Autograd's own zeros are plain."""
    if not isinstance(grad, DTensor):
        grad = wrap(grad, place.mesh, replicated(place.mesh), place.shape)
    return apply(_Share, grad, place) if torch.is_grad_enabled() else share_of(grad, place)


def share_of(grad: DTensor, place: Where) -> Tensor:
    """This rank's share of a parameter's gradient: the shares of all ranks that have it add up to the whole."""
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


def counted_part(grad: DTensor, place: Where, slot: Tensor) -> Tensor | None:
    """Where in ``slot``, in the shape of a rank's part of a parameter, its share of a gradient belongs; None where
    another rank's counts for it.
    """
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
    """The gradient, sharded as its parameter is. Rules usually leave it so; where one does not, it is redistributed."""
    dims = [placement.dim for placement in placements if isinstance(placement, Shard)]
    fits = all(
        found == own if own.is_shard() else not (isinstance(found, Shard) and found.dim in dims)
        for found, own in zip(grad.placements, placements, strict=True)
    )
    return grad if fits else redistributed_data(grad, grad.device_mesh, placements)
