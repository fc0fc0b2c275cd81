"""The layout in which an operator computes, from those of its operands."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.tensors.layouts import Layout, added_up, find_layout, layout_of, replicated
from distconv.tensors.mesh import sharded_dims


def common_layout(*tensors: Any) -> Layout:
    """The layout of the first sharded tensor, or of the first DTensor."""
    for tensor in tensors:
        if isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements):
            mesh, placements = layout_of(tensor)
            return mesh, added_up(placements)
    mesh, placements = find_layout(*tensors)
    return mesh, replicated(mesh)


@functools.lru_cache(maxsize=4096)
def layout_beside(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], combined: frozenset[int]
) -> tuple[Placement, ...] | None:
    """The layout in which no dim of ``combined`` is sharded; their axes shard the longest others. None without one."""
    result = list(placements)
    extents = list(local_extents(mesh, placements, shape, combined))
    for axis, dim in sharded_dims(mesh, placements):
        if dim not in combined:
            continue
        free = [other for other in range(len(shape)) if other not in combined and extents[other] > 1]
        if mesh.size(axis) == 1:
            result[axis] = Replicate()
        elif not free:
            return None
        else:
            best = max(free, key=lambda other: extents[other])
            result[axis] = Shard(best)
            extents[best] = -(-extents[best] // mesh.size(axis))
    return tuple(result)


def local_extents(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], without: frozenset[int]
) -> Sequence[int]:
    """The largest extents of any rank, the shards of some dims left out."""
    extents = list(shape)
    for axis, dim in sharded_dims(mesh, placements):
        if dim not in without:
            extents[dim] = -(-extents[dim] // mesh.size(axis))
    return extents


def canonical_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Dims of a tensor that an operator names, from 0; all where it names none. IndexError as one process raises it."""
    dims, most = (dims,) if isinstance(dims, int) else dims or (), max(ndim, 1)
    for dim in dims:
        if not -most <= dim < most:
            limits = f"[{-most}, {most - 1}]"
            raise IndexError(f"Dimension out of range (expected to be in range of {limits}, but got {dim})")
    return tuple(sorted({dim % ndim for dim in dims})) if dims and ndim else tuple(range(ndim))


def reduced_layout(
    placements: Sequence[Placement], dims: Sequence[int], keepdim: bool, over: Placement
) -> tuple[Placement, ...]:
    """The layout of a reduction's result: ``over`` where an axis sharded a reduced dim."""
    result: list[Placement] = []
    for placement in placements:
        if not isinstance(placement, Shard):
            result.append(placement)
        elif placement.dim in dims:
            result.append(over)
        else:
            result.append(Shard(placement.dim - (0 if keepdim else sum(dim < placement.dim for dim in dims))))
    return tuple(result)
