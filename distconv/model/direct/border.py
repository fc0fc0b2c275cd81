"""Autograd's functions from this rank's plain tensor to the DTensor, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.model.direct.shaped_layout import ShapedLayout, shaped_layout
from distconv.rules.operands.own_parts import apply as apply
from distconv.rules.whole.copies import watch_changes
from distconv.tensors.autograd_nodes import GIVEN_RESULTS, LAYOUT_CHANGES
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import undoes_shard
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import redistributed, redistributed_data


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
