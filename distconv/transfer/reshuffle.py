"""Moves a tensor between shards of two shapes with as many elements, for a view: by one collective, without a gather.

Elements keep their place in the flat order of the whole tensor. Which rank owns a place before and after follows from
the layouts, so no message is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from distconv.tensors.layouts import local_box
from distconv.tensors.mesh import ranks_of, sharded_dims, whole_group
from distconv.transfer.route import Route
from distconv.transfer.tracing import constant, planned

Layouts = tuple[tuple[Placement, ...], tuple[int, ...]]
"""The placements of a tensor along the axes of its mesh, and its shape."""


@dataclass(frozen=True)
class Reshuffle:
    """This rank's share: ``sending`` orders the rows of its local tensor by receiver, ``placing`` has the positions in
    the result of those that it receives."""

    sending: Tensor = field(repr=False)
    placing: Tensor = field(repr=False)
    route: Route

    def fetch(self, local: Tensor, row: int = 1) -> Tensor:
        """The rows this rank owns afterwards, from those it owned before, each of so many elements."""
        return _moved(local.reshape(-1, row), self.sending, self.route, self.placing)

    def adjoint(self, grad: Tensor, row: int = 1) -> Tensor:
        """The gradient of the rows it owned before."""
        return _moved(grad.reshape(-1, row), self.placing, self.route.back, self.sending)


def _moved(rows: Tensor, sending: Tensor, route: Route, placing: Tensor) -> Tensor:
    row = rows.shape[1]
    arrived = route.send([rows[constant(sending, rows)]], rows, row).wait().view(-1, row)
    result = torch.empty_like(arrived)
    result[constant(placing, rows)] = arrived
    return result


@planned(32)
def make_reshuffle(mesh: DeviceMesh, before: Layouts, after: Layouts) -> Reshuffle:
    """From (placements, shape) to (placements, shape). The same mesh axes shard both."""
    order = {rank: index for index, rank in enumerate(ranks_of(mesh))}
    members = mesh.mesh.clone().apply_(order.__getitem__)
    have, want = _positions(mesh, before), _positions(mesh, after)
    destination, source = _owners(mesh, members, after, have), _owners(mesh, members, before, want)
    sent, received = (tuple(torch.bincount(of, minlength=len(order)).tolist()) for of in (destination, source))
    return Reshuffle(
        torch.argsort(destination, stable=True).to(mesh.device_type),
        torch.argsort(source, stable=True).to(mesh.device_type),
        Route(sent, received, whole_group(mesh)),
    )


def _positions(mesh: DeviceMesh, layouts: Layouts) -> Tensor:
    """The flat place in the whole tensor of every element that this rank owns, ascending."""
    placements, shape = layouts
    result = torch.zeros((), dtype=torch.int64)
    for (start, stop), extent in zip(local_box(mesh, placements, shape), shape, strict=True):
        result = result.unsqueeze(-1) * extent + torch.arange(start, stop)
    return result.flatten()


def _owners(mesh: DeviceMesh, members: Tensor, layouts: Layouts, positions: Tensor) -> Tensor:
    """The member of the mesh's group that owns each place; along an axis that shards nothing, with this coordinate."""
    placements, shape = layouts
    mine = mesh.get_coordinate()
    assert mine is not None
    coordinates = [torch.full_like(positions, coordinate) for coordinate in mine]
    within: dict[int, tuple[Tensor, Tensor]] = {}
    for axis, dim in sharded_dims(mesh, placements):
        stride = math.prod(shape[dim + 1 :])
        index, extent = within.get(dim, (positions // stride % shape[dim], torch.full_like(positions, shape[dim])))
        size = -(-extent // mesh.size(axis))
        coordinates[axis] = index // size
        index = index - coordinates[axis] * size
        within[dim] = index, torch.minimum(extent - coordinates[axis] * size, size)
    return members[tuple(coordinates)]


def covered_interval(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[int, int] | None:
    """The interval of flat places that a box covers, or None where they have gaps."""
    if any(start == stop for start, stop in box):
        return 0, 0
    dim = 0
    while dim < len(box) - 1 and box[dim][1] - box[dim][0] == 1:
        dim += 1
    if any(box[later] != (0, shape[later]) for later in range(dim + 1, len(box))):
        return None
    first = last = 0
    for (start, stop), extent in zip(box, shape, strict=True):
        first, last = first * extent + start, last * extent + stop - 1
    return first, last + 1
