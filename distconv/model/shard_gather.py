"""Cuts whole tensors into shards, and gathers shards into whole tensors, differentiably; and makes shards of values.

A loss may compute one term of a small result, which is plain, and add it to a term of a large one, which has shards.
The gradient of the plain term arrives with the layout of the other. The term counts as replicated, so every rank needs
all of its gradient: it is gathered, and plain from there on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from distconv.agreement.ledger import settle
from distconv.tensors import hooks
from distconv.tensors.dtensors import may_be_channels_last, memory_format, wrap, wrap_strided
from distconv.tensors.layouts import added_up, replicated
from distconv.tensors.mesh import is_ours, placements
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import redistributed_data, unsharded


class _ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, layout: tuple[Placement, ...]) -> DTensor:
        local = local_as(x.detach(), mesh, layout)
        if local.shape != x.shape:
            local = local.clone()  # otherwise a change in place would change a part of x
        return wrap(local, mesh, layout, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grad) if isinstance(grad, DTensor) else grad, None, None  # autograd's own zeros are plain


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: DTensor) -> Tensor:
        ctx.layout = y.device_mesh, tuple(added_up(y.placements))
        return whole(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return cut(grad, *ctx.layout)


def whole(y: DTensor) -> Tensor:
    """The full tensor on every rank: partial sums are added, shards gathered. No autograd."""
    local = unsharded(y)
    return local.clone() if local is y._local_tensor else local


def cut(x: Tensor, mesh: DeviceMesh, layout: tuple[Placement, ...]) -> DTensor:
    """This rank's part of a full tensor, in a layout of the mesh."""
    return _ToShards.apply(x, mesh, layout)


def to_shards(x: Tensor, mesh: DeviceMesh, beside: int = 0) -> DTensor:
    """Cuts a full tensor as an input beside others, which have up to ``beside`` dims; a DTensor stays as it is."""
    return x if isinstance(x, DTensor) else cut(x, mesh, placements(mesh, x.dim(), beside))


def gather(y: Tensor) -> Tensor:
    """The whole tensor of a DTensor, on every rank. Differentiable.

    Every rank must compute the same from the result, as one process would: backward then needs no messages.

    Args:
        y: a DTensor; a plain tensor is returned as it is.
    """
    if not isinstance(y, DTensor):
        return y
    settle(y.device_mesh)
    return _Gather.apply(y)


def _gather_gradient(x: Tensor) -> None:
    """Makes the gradient of a plain tensor beside a DTensor of ours plain, too."""
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(functools.partial(_with_gathered, x.output_nr))


def _with_gathered(output: int, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    grad = grads[output]
    if not (isinstance(grad, DTensor) and is_ours(grad.device_mesh)):
        return None
    return *grads[:output], gather(grad), *grads[output + 1 :]


hooks.differentiated_operands.append(_gather_gradient)


def sharded(tensor: Tensor, mesh: DeviceMesh, layout: Sequence[Placement]) -> DTensor:
    """A DTensor with the value of a tensor, in memory of its own. No autograd.

    A plain tensor must be equal on all ranks, and is cut without communication.
    """
    if isinstance(tensor, DTensor):
        return redistributed_data(tensor, mesh, layout)
    local = local_as(tensor.detach(), mesh, layout).clone()
    if memory_format(tensor) is torch.contiguous_format or may_be_channels_last(
        mesh, tuple(layout), tuple(tensor.shape)
    ):
        return wrap(local, mesh, layout, tensor.shape)
    # Shards do not show the memory format, which a checkpoint is to keep: it is in the strides of the DTensor.
    return wrap_strided(local.contiguous(), mesh, layout, tensor.shape, tensor.stride())


def sharded_like(x: DTensor, value: Tensor) -> DTensor:
    """A value in the layout of x, or replicated if it lacks a dim that x shards."""
    layout = x.placements
    if any(isinstance(placement, Shard) and placement.dim >= value.dim() for placement in layout):
        layout = replicated(x.device_mesh)
    return sharded(value.detach(), x.device_mesh, tuple(layout))
