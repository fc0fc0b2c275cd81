"""Layouts of tensors: the interval of each dim that each rank owns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.settings.partition import flat_index, nested_ownership, ownership
from distconv.tensors.mesh import sharded_dims
from distconv.tensors.refusal import UnsupportedOperation, refuse

Layout = tuple[DeviceMesh, tuple[Placement, ...]]


def layout_of(x: DTensor) -> Layout:
    """(mesh, placements) of a DTensor."""
    return x.device_mesh, x.placements


def find_layout(*tensors: Any) -> Layout:
    """The layout of the first DTensor among the arguments."""
    return next(layout_of(tensor) for tensor in tensors if isinstance(tensor, DTensor))


def shard_axes(mesh: DeviceMesh, placements: Sequence[Placement], first: int = 0) -> dict[int, tuple[int, ...]]:
    """{tensor dim: mesh axes} of the shards of dims from ``first`` on. A later axis divides the shards of an earlier.

    ``UnsupportedOperation`` for a placement that is sharded, but no plain shard.
    """
    axes: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            if placement.dim >= first:
                axes[placement.dim] = (*axes.get(placement.dim, ()), axis)
        elif placement.is_shard():
            raise UnsupportedOperation(f"placement {placement} is no plain shard")
    return axes


def dim_axes(mesh: DeviceMesh, placements: Sequence[Placement], dim: int) -> tuple[int, ...]:
    """The mesh axes of more than one rank that shard a dim, each within the shards of those before."""
    return tuple(axis for axis, of in sharded_dims(mesh, placements) if of == dim and mesh.size(axis) > 1)


def owners(mesh: DeviceMesh, axes: Sequence[int], extent: int) -> tuple[tuple[int, int], ...]:
    """The interval of a dim that each rank along the axes that shard it owns; the last axis runs fastest."""
    return nested_ownership(extent, tuple(mesh.size(axis) for axis in axes))


def coordinate(mesh: DeviceMesh, axes: Sequence[int]) -> int:
    """The index of this rank's interval in what ``owners`` returns for these axes."""
    return flat_index(map(mesh.get_local_rank, axes), map(mesh.size, axes))


def local_shape(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of this rank's shard of a tensor of global ``shape``."""
    return tuple(stop - start for start, stop in local_box(mesh, placements, shape))


def local_box(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The interval of every dim that this rank owns. Where several axes shard one dim, a later one divides a shard."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return box_at(mesh, placements, shape, coordinate)


def box_at(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The interval of every dim that the rank at a coordinate of the mesh owns."""
    box = [(0, extent) for extent in shape]
    for axis, dim in sharded_dims(mesh, placements):
        first, last = box[dim]
        start, stop = ownership(last - first, mesh.size(axis))[coordinate[axis]]
        box[dim] = (first + start, first + stop)
    return tuple(box)


def boxes_along(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], axes: Sequence[int]
) -> list[tuple[tuple[int, int], ...]]:
    """The boxes of the ranks that differ from this one in coordinates on the axes only, the last running fastest."""
    here = mesh.get_coordinate()
    assert here is not None
    places = ((at,) if axis not in axes else range(mesh.size(axis)) for axis, at in enumerate(here))
    return [box_at(mesh, placements, shape, place) for place in itertools.product(*places)]


def replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """The placements of a tensor that every rank has whole."""
    return (Replicate(),) * mesh.ndim


def has_partial(placements: Sequence[Placement]) -> bool:
    """Whether some placement is a partial sum."""
    # Every operator asks, and a loop takes half the time of any().
    for placement in placements:  # noqa: SIM110
        if placement.is_partial():
            return True
    return False


def added_up(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The layout that a tensor has once its partial sums are added: replicated along their axes."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def placements_on(x: Tensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """The placements of a tensor on a mesh once its partial sums are added; a plain tensor is replicated."""
    return added_up(x.placements) if isinstance(x, DTensor) else replicated(mesh)


def refuse_partial(func: Any, placements: Sequence[Placement], what: str = "its input") -> None:
    """``UnsupportedOperation`` for a partial sum."""
    if has_partial(placements):
        raise refuse(func, f"{what} is a partial sum: {tuple(placements)}")


def input_layout(func: Any, x: Any, *others: Any) -> Layout:
    """The layout of an operator's input; a plain one beside DTensors is replicated on the mesh of the first.

    ``UnsupportedOperation`` for a partial sum.
    """
    mesh, placements = find_layout(x, *others)
    if not isinstance(x, DTensor):
        return mesh, replicated(mesh)
    refuse_partial(func, placements)
    return mesh, placements


def undoes_shard(mesh: DeviceMesh, current: Sequence[Placement], target: Sequence[Placement]) -> bool:
    """Whether going from one layout to the other would gather or reshuffle shards, or make partial sums."""
    return any(
        mesh.size(axis) > 1 and before != after and (before.is_shard() or after.is_partial())
        for axis, (before, after) in enumerate(zip(current, target, strict=True))
    )
