"""From DTensors to this rank's plain tensors and back, differentiable: what lies between is autograd's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from distconv.dtensors import wrap
from distconv.layouts import replicated
from distconv.rules.reduction import towards_parameter
from distconv.transfer.local_part import local_as
from distconv.transfer.partial_sums import added
from distconv.transfer.redistribution import moved, relaid


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, summed: Sequence[int]) -> Tensor:
        placements = x.placements
        ctx.layout = x.device_mesh, [Partial() if axis in summed else p for axis, p in enumerate(placements)], x.shape
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        whole = wrap(grad, *ctx.layout)
        return whole if towards_parameter() else added(whole), None


class _Wrapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
    ) -> DTensor:
        ctx.layout = mesh, placements
        return wrap(local.view_as(local), mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        mesh, placements = ctx.layout
        if isinstance(grad, DTensor) and grad.device_mesh == mesh:
            return moved(grad, mesh, placements)._local_tensor, None, None, None
        return local_as(grad, mesh, placements), None, None, None


def wrapped(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The DTensor whose part on this rank is ``local``. Differentiable."""
    return _Wrapped.apply(local, mesh, tuple(placements), tuple(shape))


def brought(
    x: DTensor | Tensor, mesh: DeviceMesh, placements: Sequence[Placement], summed: Sequence[int] = ()
) -> Tensor:
    """This rank's part of a tensor laid out as the placements say; a plain one counts as replicated. Differentiable.

    ``summed``: the axes along which the gradients of the ranks' parts, which are equal, are to be added.
    """
    if not isinstance(x, DTensor):
        if not x.requires_grad:
            return local_as(x, mesh, placements)
        x = wrapped(x, mesh, replicated(mesh), x.shape)
    return _Local.apply(relaid(x, mesh, placements), tuple(summed))
