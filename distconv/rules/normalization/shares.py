"""The ranks that share the statistics of a tensor, and the layout of one number per channel beside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from distconv.rules.normalization.combining import StatisticsShare
from distconv.rules.operands.own_parts import as_own_part
from distconv.tensors.layouts import box_at
from distconv.tensors.mesh import sharded_dims
from distconv.transfer.group import joint_group, joint_order
from distconv.transfer.tracing import planned


def split_axes(mesh: DeviceMesh, placements: Sequence[Placement], dims: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes of more than one rank that shard some of the dims."""
    return tuple(axis for axis, dim in sharded_dims(mesh, placements) if dim in dims and mesh.size(axis) > 1)


def boxes_along(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], axes: tuple[int, ...]
) -> list[tuple[tuple[int, int], ...]]:
    """The box of each member of the axes' group, in the group's order."""
    here = mesh.get_coordinate()
    assert here is not None
    places = list(itertools.product(*(range(mesh.size(axis)) for axis in axes)))
    order = joint_order(mesh, axes)[0]
    found = []
    for place in (places[at] for at in order):
        coordinate = list(here)
        for axis, at in zip(axes, place, strict=True):
            coordinate[axis] = at
        found.append(box_at(mesh, placements, shape, coordinate))
    return found


@planned(4096)
def statistics_share(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dims: tuple[int, ...]
) -> StatisticsShare | None:
    """The share of statistics over ``dims`` of a tensor of global ``shape``; None where none of them is sharded."""
    axes = split_axes(mesh, placements, dims)
    if not axes:
        return None
    boxes = boxes_along(mesh, placements, shape, axes)
    counts = [math.prod(box[dim][1] - box[dim][0] for dim in dims) for box in boxes]
    here = joint_order(mesh, axes)[1]
    return StatisticsShare(joint_group(mesh, axes), here, tuple((count,) for count in counts), sum(counts))


def check_vectors(func: Any, channels: int, **vectors: Tensor | None) -> None:
    """RuntimeError unless each has one number per channel."""
    for name, vector in vectors.items():
        if vector is not None and tuple(vector.shape) != (channels,):
            label = name.replace("_", " ")
            raise RuntimeError(f"{func}: its {label} has shape {tuple(vector.shape)}; accepted: ({channels},)")


def vector_layout(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The layout of one number per channel beside channels (dim 1) with these placements."""
    return tuple(Shard(0) if placement == Shard(1) else Replicate() for placement in placements)


def vectors_here(mesh: DeviceMesh, placements: Sequence[Placement], *vectors: Tensor | None) -> list[Tensor | None]:
    """This rank's part of vectors with one number per channel, whose gradients are added over samples and space."""
    summed = [axis for axis, dim in sharded_dims(mesh, placements) if dim != 1]
    layout = vector_layout(placements)
    return [None if vector is None else as_own_part(vector, mesh, layout, summed) for vector in vectors]
