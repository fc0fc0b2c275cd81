"""Makes DTensors of local tensors, and the reverse, without communication. Results keep the format of operands."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from distconv.tensors.layouts import dim_axes, owners


def wrap(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The DTensor of global ``shape`` whose shard on this rank is ``local``; no communication, no autograd.

    A shard with gaps is copied; channels_last, where every rank's shard shows it, and whole tensors stay as they are.
    """
    strides = [1] * len(shape)
    order = range(len(shape) - 1, -1, -1)
    if not local.is_contiguous():
        if local.shape == tuple(shape) and all(placement.is_replicate() for placement in placements):
            return _dtensor(local, _spec(mesh, tuple(placements), tuple(shape), local.stride(), local.dtype))
        if local.dim() > 3 and local.stride(1) == 1 and may_be_channels_last(mesh, tuple(placements), tuple(shape)):
            order = (1, *range(len(shape) - 1, 1, -1), 0)  # type: ignore[assignment]
            local = local.contiguous(memory_format=CHANNELS_LAST[local.dim()])
        else:
            local = local.contiguous()
    step = 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return _dtensor(local, _spec(mesh, tuple(placements), tuple(shape), tuple(strides), local.dtype))


def wrap_strided(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    strides: Sequence[int],
    requires_grad: bool = False,
) -> DTensor:
    """Does as ``wrap``, but keeps the gaps and repeated elements of ``local``. ``strides``: of the whole."""
    return _dtensor(local, _spec(mesh, tuple(placements), tuple(shape), tuple(strides), local.dtype), requires_grad)


def rewrap(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor with the layout of ``like``, of another local tensor with the same shape and strides."""
    return _dtensor(local, like._spec)


def local_of(value: Any) -> Any:
    """The local tensor of a DTensor; any other value as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def _dtensor(local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    # Not DTensor(...): its __init__ does nothing, and takes three times as long as all the rest.
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


@functools.lru_cache(maxsize=4096)
def _spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))


def row_major_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """The description of a contiguous DTensor."""
    strides = tuple(math.prod(max(extent, 1) for extent in shape[dim + 1 :]) for dim in range(len(shape)))
    return _spec(mesh, placements, shape, strides, dtype)


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last memory formats by the number of dims."""


def memory_format(x: Tensor) -> torch.memory_format:
    """The channels-last format of x where it has that and no other, else the contiguous one."""
    last = CHANNELS_LAST.get(x.dim())
    if last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format


def single_dims_in_format(local: Tensor, shape: Sequence[int]) -> Tensor:
    """A channels-last part, with the strides of that format where a dim has one element of several of ``shape``.

    A view may give such a dim any stride, and torch's kernels see by all strides which format their results get.
    """
    if 1 not in local.shape or memory_format(local) is torch.contiguous_format:
        return local
    strides, step = list(local.stride()), 1
    for dim in (1, *range(local.dim() - 1, 1, -1), 0):
        if local.shape[dim] == 1 < shape[dim]:
            strides[dim] = step
        step *= local.shape[dim]
    return local.as_strided(local.shape, strides)


@functools.lru_cache(maxsize=8192)
def may_be_channels_last(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor may have a channels-last format: if the strides of every rank's shard show it.

    Shards that are empty, of one channel or of one pixel have the strides of both formats, and what is computed from
    them has the contiguous one. So that all ranks have one format, a tensor with such a shard is contiguous on all.
    """
    if len(shape) not in CHANNELS_LAST:
        return False
    least = [
        min(stop - start for start, stop in owners(mesh, dim_axes(mesh, placements, dim), extent))
        for dim, extent in enumerate(shape)
    ]
    return 0 not in least and least[1] > 1 and max(least[2:]) > 1
