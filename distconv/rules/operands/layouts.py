"""The layout in which an operator computes, from those of its operands, and tensors that broadcast, laid out to match.

Along one axis all tensors that broadcast are sharded by the same dim of the result, the one for which least moves. One
without that dim, or with extent 1 there, is needed whole: it is no larger than a rank's share of the result.

If an axis shards a dim of extent 1, the first rank of the axis owns the element and the others nothing. Beside a longer
dim each rank needs it: one exchange fetches it. The gradient of the broadcast tensor is a sum over the dim, which is
replicated (``reduction``), and so it reaches the owner. The two operations are each other's adjoint.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.tensors.layouts import Layout, added_up, box_at, find_layout, layout_of, replicated, undoes_shard
from distconv.tensors.mesh import sharded_dims
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import redistributed_data
from distconv.transfer.tracing import planned


def common_layout(*tensors: Any) -> Layout:
    """The layout of the first sharded tensor, or of the first DTensor."""
    for tensor in tensors:
        if isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements):
            mesh, placements = layout_of(tensor)
            return mesh, added_up(placements)
    mesh, placements = find_layout(*tensors)
    return mesh, replicated(mesh)


def joined_layout(tensors: Sequence[Tensor]) -> Layout:
    """The layout of tensors put together: a tensor that every rank has whole is cut to match shards; nothing moves."""
    mesh, placements = common_layout(*tensors)
    others = [tensor.placements for tensor in tensors if isinstance(tensor, DTensor) and tensor.device_mesh == mesh]
    return mesh, tuple(
        placement if placement.is_shard() else next((own[axis] for own in others if own[axis].is_shard()), placement)
        for axis, placement in enumerate(placements)
    )


@functools.lru_cache(maxsize=4096)
def layout_beside(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], combined: frozenset[int]
) -> tuple[Placement, ...] | None:
    """The layout in which no dim of ``combined`` is sharded; their axes shard the longest others. None without one."""
    result = list(placements)
    kept = [Replicate() if isinstance(p, Shard) and p.dim in combined else p for p in placements]
    extents = [stop - start for start, stop in box_at(mesh, kept, shape, [0] * len(kept))]  # the largest of any rank
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


def sharding(tensors: Sequence[Tensor], shape: Sequence[int]) -> Layout:
    """The layout of the result of tensors that broadcast to a shape."""
    mesh, _ = common_layout(*tensors)
    layouts = (x.placements if isinstance(x, DTensor) and x.device_mesh == mesh else replicated(mesh) for x in tensors)
    operands = tuple((placements, tuple(x.shape)) for placements, x in zip(layouts, tensors, strict=True))
    return mesh, broadcast_result(mesh, operands, tuple(shape))


@planned(4096)
def broadcast_result(
    mesh: DeviceMesh, operands: tuple[tuple[tuple[Placement, ...], tuple[int, ...]], ...], shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    """The layout of what such tensors broadcast to. Of what costs the same, the first tensor decides."""
    result: list[Placement] = []
    for axis, ranks in enumerate(mesh.shape):
        costs: dict[Placement, float] = {}
        for placements, own in operands:
            placement = placements[axis]
            if isinstance(placement, Shard):
                way = Shard(placement.dim + len(shape) - len(own))
                after = [(layouts[axis], broadcast_layout(of, [way], shape)[0], of) for layouts, of in operands]
                costs[way] = sum(moving(p, to, of, ranks) for p, to, of in after)
        result.append(min(costs, key=costs.__getitem__, default=Replicate()))
    return tuple(result)


def aligned(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> Tensor:
    """This rank's part of a tensor that broadcasts to ``shape``, of which it has the part that ``placements`` say."""
    return part_of(tensor, mesh, broadcast_layout(tensor.shape, placements, shape))


def broadcast_layout(
    own: Sequence[int], placements: Sequence[Placement], shape: Sequence[int]
) -> tuple[Placement, ...]:
    """The layout of a tensor of shape ``own`` beside one of ``shape``, to which it broadcasts."""
    missing = len(shape) - len(own)
    target: list[Placement] = []
    for placement in placements:
        dim = placement.dim - missing if isinstance(placement, Shard) else -1
        target.append(Shard(dim) if dim >= 0 and own[dim] == shape[dim + missing] else Replicate())
    return tuple(target)


def moving(before: Placement, after: Placement, shape: Sequence[int], ranks: int) -> float:
    """The elements that a rank receives where a tensor's placement along an axis changes, in (ranks - 1) / ranks.

    ``shape``: of the whole. ``ranks``: of the axis.
    """
    if before == after or not isinstance(before, Shard):
        return 0.0
    return math.prod(shape) / (ranks if isinstance(after, Shard) else 1)


def part_of(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of a tensor under a layout that was chosen here: gathered along the axes that need it whole."""
    if isinstance(tensor, DTensor) and tensor.device_mesh == mesh and undoes_shard(mesh, tensor.placements, placements):
        tensor = redistributed_data(tensor, mesh, placements)
    return local_as(tensor, mesh, placements)
