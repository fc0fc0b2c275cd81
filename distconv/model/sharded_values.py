"""Values of parameters in shards, each in memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from distconv.tensors.dtensors import may_be_channels_last, memory_format, wrap, wrap_strided
from distconv.tensors.layouts import replicated
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import redistributed_data


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
