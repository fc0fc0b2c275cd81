"""The ranks that share the statistics of a tensor, and vectors with one number per channel: layouts, and gathering."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from distconv.rules.normalization.combining import StatisticsShare
from distconv.rules.operands.own_parts import as_own_part
from distconv.tensors.layouts import box_at, owners
from distconv.tensors.mesh import sharded_dims
from distconv.transfer.collectives import all_gathered
from distconv.transfer.group import joint_group, joint_order
from distconv.transfer.tracing import constant, planned


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


class _Gathered(NamedTuple):
    """The gathering of vectors, sharded over some axes, to every rank in one exchange."""

    group: dist.ProcessGroup | None
    ranks: int
    padding: int  # Elements behind what this rank has, so that all ranks send as many.
    places: Tensor  # For each element of the whole vectors in order, its position in the data that all ranks sent.


def gathered(mesh: DeviceMesh, axes: tuple[int, ...], values: list[Tensor], channels: tuple[int, ...]) -> list[Tensor]:
    """Whole vectors from this rank's shards of them. Collective."""
    plan = _plan(mesh, axes, channels, values[0].device)
    own = torch.cat([*values, values[0].new_zeros(plan.padding)] if plan.padding else values)
    whole = all_gathered(own, plan.ranks, plan.group).index_select(0, constant(plan.places, own))
    return list(whole.split(channels))


@planned(1024)
def _plan(mesh: DeviceMesh, axes: tuple[int, ...], channels: tuple[int, ...], device: torch.device) -> _Gathered:
    order, here = joint_order(mesh, axes)
    owned = [[(stop - start) for start, stop in owners(mesh, axes, extent)] for extent in channels]
    each = [sum(own[at] for own in owned) for at in range(len(order))]
    longest = max(each)
    index: list[int] = []
    starts = {at: member * longest for member, at in enumerate(order)}
    for own in owned:
        for at, extent in enumerate(own):
            index += range(starts[at], starts[at] + extent)
            starts[at] += extent
    padding = longest - each[order[here]]
    return _Gathered(joint_group(mesh, axes), len(order), padding, torch.tensor(index, device=device))
