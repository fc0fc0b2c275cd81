"""Reading and writing at positions of dims: x[numbers] and x[numbers] = values, as tables of relative positions are
read.

The indices select along some dims of x, and broadcast with each other. In the result their dims replace the selected
ones, or come first if other dims are between these; all other dims of x pass through. An axis shards a dim that passes
through, or a dim of the indices. What is added at sharded indices, as in the gradient of a table, is a sum over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves

from distconv.rules.operands.layouts import layout_beside, part_of
from distconv.rules.operands.sums import all_reduce, towards_parameter
from distconv.rules.whole import permit, whole_beside, whole_or_refused
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import coordinate, find_layout, placements_on
from distconv.transfer.redistribution import redistributed_data

Indices = Sequence[Tensor | None]
Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Lookup:
    """Which dims of x are counted, which pass, and where the dims of the indices are in the result."""

    counted: tuple[int, ...]
    passing: tuple[int, ...]
    numbered: tuple[int, ...]  # The shape of all indices together.
    first: int  # The dim of the result at which that of the indices begin.
    shape: tuple[int, ...]  # The shape of the result.

    def of(self, dim: int) -> int:
        """The dim of the result that a passing dim of x becomes."""
        at = self.passing.index(dim)
        return at if at < self.first else at + len(self.numbered)

    def x_dim(self, dim: int) -> int | None:
        """The passing dim of x that a dim of the result is; None for one of the indices."""
        if dim < self.first:
            return self.passing[dim]
        return None if dim < self.first + len(self.numbered) else self.passing[dim - len(self.numbered)]

    def dims_of_index(self, index: Tensor) -> range:
        """The dims of the result that are those of one index."""
        end = self.first + len(self.numbered)
        return range(end - index.dim(), end)

    def of_x(self, result: Placements) -> Placements:
        """The layout of x for this layout of the result."""
        dims = (self.x_dim(p.dim) if isinstance(p, Shard) else None for p in result)
        return tuple(Replicate() if dim is None else Shard(dim) for dim in dims)


def make_lookup(shape: Sequence[int], indices: Indices) -> Lookup:
    """Of a tensor of that shape, by torch's rules of indexing."""
    counted = tuple(dim for dim, index in enumerate(indices) if index is not None)
    passing = tuple(dim for dim in range(len(shape)) if dim not in counted)
    numbered = tuple(torch.broadcast_shapes(*(index.shape for index in indices if index is not None)))
    together = not counted or counted == tuple(range(counted[0], counted[-1] + 1))
    first = counted[0] if counted and together else 0
    rest = [shape[dim] for dim in passing]
    return Lookup(counted, passing, numbered, first, (*rest[:first], *numbered, *rest[first:]))


def _sharded_dim(tensor: Any, axis: int, dims: range, shape: Sequence[int]) -> int | None:
    """The dim of the result that an axis shards of a tensor whose dims are these of the result."""
    placement = tensor.placements[axis] if isinstance(tensor, DTensor) else None
    if not isinstance(placement, Shard) or tensor.shape[placement.dim] != shape[dims[placement.dim]]:
        return None
    return dims[placement.dim]


def _part_of(dims: range, extents: Sequence[int], result: Placements, shape: Sequence[int]) -> Placements:
    """The layout of a tensor whose dims, broadcast, are these of the result."""
    wanted = []
    for p in result:
        cut = isinstance(p, Shard) and p.dim in dims and extents[dims.index(p.dim)] == shape[p.dim]
        wanted.append(Shard(dims.index(p.dim)) if cut and isinstance(p, Shard) else Replicate())
    return tuple(wanted)


def _beside(x: Tensor, mesh: DeviceMesh, counted: Sequence[int]) -> Placements | None:
    """The layout in which no counted dim of x is sharded; None without one."""
    return layout_beside(mesh, placements_on(x, mesh), tuple(x.shape), frozenset(counted))


WHOLE = "all of its dims that could be sharded are counted by indices"


def _cut(
    func: Any, mesh: DeviceMesh, lookup: Lookup, result: Placements, tensors: Sequence[tuple[Tensor, range]]
) -> list[Tensor]:
    """This rank's part of each tensor, whose dims are those of the result, beside a result in this layout.

    UnsupportedOperation, before anything is sent, where one would have to be gathered and is not small.
    """
    wanted = [_part_of(dims, tensor.shape, result, lookup.shape) for tensor, dims in tensors]
    for (tensor, _), placements in zip(tensors, wanted, strict=True):
        if isinstance(tensor, DTensor):
            sharded = ((axis, p) for axis, p in enumerate(tensor.placements) if isinstance(p, Shard))
            long = [axis for axis, p in sharded if mesh.size(axis) > 1 and tensor.shape[p.dim] != 1]
            if not all(placements[axis].is_shard() for axis in long):
                permit(func, [tensor], "along dims that are sharded otherwise")
    return [part_of(tensor, mesh, placements) for (tensor, _), placements in zip(tensors, wanted, strict=True)]


def read(func: Any, x: Tensor, indices: Indices) -> DTensor:
    """x[indices]: sharded by the dims that pass, and by those of the indices."""
    mesh, _ = find_layout(*tree_leaves((x, list(indices))))
    lookup = make_lookup(x.shape, indices)
    beside = _beside(x, mesh, lookup.counted)
    if beside is None:
        return whole_or_refused(func, (x, indices), {}, WHOLE)
    numbers = [index for index in indices if index is not None]
    result: list[Placement] = []
    for axis, placement in enumerate(beside):
        dim = lookup.of(placement.dim) if isinstance(placement, Shard) else _first(axis, numbers, lookup)
        result.append(Replicate() if dim is None else Shard(dim))
    places = _cut(func, mesh, lookup, tuple(result), [(index, lookup.dims_of_index(index)) for index in numbers])
    local = func(part_of(x, mesh, lookup.of_x(tuple(result))), _in_place_of(indices, places))
    return wrap(local, mesh, result, lookup.shape)


def _first(axis: int, numbers: Sequence[Tensor], lookup: Lookup) -> int | None:
    """The dim of the result that an axis shards of the first index of which it shards one."""
    found = (_sharded_dim(index, axis, lookup.dims_of_index(index), lookup.shape) for index in numbers)
    return next((dim for dim in found if dim is not None), None)


def _in_place_of(indices: Indices, local: Sequence[Tensor]) -> list[Tensor | None]:
    numbers = iter(local)
    return [None if index is None else next(numbers) for index in indices]


def write_at(func: Any, x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False, *rest: Any) -> Tensor:
    """x with the values at the indices, or added there: laid out as x where it is changed in place."""
    mesh, _ = find_layout(*tree_leaves((x, values, list(indices))))
    lookup, in_place = make_lookup(x.shape, indices), func._schema.name.endswith("_")
    beside = _beside(x, mesh, lookup.counted)
    if beside is None:
        return whole_or_refused(func, (x, indices, values, accumulate, *rest), {}, WHOLE)
    numbers = [index for index in indices if index is not None]
    of_values = range(len(lookup.shape) - values.dim(), len(lookup.shape))
    result: list[Placement] = []
    for axis, placement in enumerate(beside):
        dim = lookup.of(placement.dim) if isinstance(placement, Shard) else None
        if dim is None:
            dim = _sharded_dim(values, axis, of_values, lookup.shape)
            dim = _first(axis, numbers, lookup) if dim is None else dim
            if dim is not None and lookup.x_dim(dim) is None and not accumulate:
                dim = None  # of two values for one place, all ranks must take the same
        result.append(Replicate() if dim is None else Shard(dim))
    tensors = [*((index, lookup.dims_of_index(index)) for index in numbers), (values, of_values)]
    *places, new = _cut(func, mesh, lookup, tuple(result), tensors)
    target = lookup.of_x(tuple(result))
    summed = [a for a, (p, q) in enumerate(zip(result, target, strict=True)) if p.is_shard() and not q.is_shard()]
    own = part_of(x, mesh, target)
    if coordinate(mesh, summed):  # the first of the ranks that add has what was there before
        own = torch.zeros_like(own)
    local = torch.ops.aten.index_put.default(own, _in_place_of(indices, places), new, accumulate)
    if summed and towards_parameter() and not in_place:
        return wrap(local, mesh, [Partial() if a in summed else p for a, p in enumerate(target)], x.shape)
    y = wrap(all_reduce(local, mesh, summed) if math.prod(map(mesh.size, summed)) > 1 else local, mesh, target, x.shape)
    if not in_place:
        return y
    if isinstance(x, DTensor):
        x._local_tensor.copy_(redistributed_data(y, x.device_mesh, x.placements)._local_tensor)
        return x
    return x.copy_(whole_beside(func, y))
