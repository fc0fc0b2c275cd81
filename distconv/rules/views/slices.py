"""Slices, selections, splits, concatenation, flips and rolls along sharded dims, in the positions of the whole dim.

Along a dim that is not sharded they are views, as in one process. Along a sharded dim they are copies in the canonical
layout, and whatever is written to a copy is sent back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from distconv.rules.operands.layouts import joined_layout, reduced_layout
from distconv.rules.registry import rule
from distconv.rules.stock import stock
from distconv.rules.views.padding import restricted
from distconv.rules.whole.copies import copy_of
from distconv.tensors.dtensors import wrap, wrap_strided
from distconv.tensors.layouts import coordinate, dim_axes, layout_of, local_shape, owners
from distconv.tensors.refusal import refuse
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.local_part import local_as
from distconv.transfer.needs import Need, Piece, window
from distconv.transfer.tracing import planned


@planned(4096)
def _slice_plan(mesh: DeviceMesh, axes: tuple[int, ...], dim: int, extent: int, positions: range) -> Exchange:
    """Fetches for each rank the elements from the first to the last position that it has of a slice."""
    owned = owners(mesh, axes, len(positions))
    needs = tuple(window((positions[a], positions[b - 1] + 1), extent) if b > a else () for a, b in owned)
    return exchange(mesh, axes, dim, owners(mesh, axes, extent), needs)


def _replaced(shape: Sequence[int], dim: int, extent: int) -> tuple[int, ...]:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def _every(x: Tensor, dim: int, step: int) -> Tensor:
    return x if step == 1 else x[(slice(None),) * dim + (slice(None, None, step),)]


@rule("aten::slice.Tensor")
def slice_of(
    func: Any, x: DTensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> DTensor:
    """x[start:stop:step] along dim."""
    dim %= x.dim()
    axes = dim_axes(*layout_of(x), dim)
    begin, end, _ = slice(start, stop, step).indices(x.shape[dim])
    if not axes or (begin, end, step) == (0, x.shape[dim], 1):
        return stock(func, (x, dim, begin, end, step))  # torch's strategy counts once from the end, at most
    mesh, placements = layout_of(x)
    positions = range(begin, end, step)
    local = _slice_plan(mesh, axes, dim, x.shape[dim], positions).fetch(x._local_tensor)
    shape = _replaced(x.shape, dim, len(positions))
    write = functools.partial(_written, dim, positions)
    return copy_of(wrap(_every(local, dim, step), mesh, placements, shape), x, write, (dim, positions))


def _written(dim: int, positions: range, x: DTensor, part: DTensor) -> None:
    """Writes a part of x, in the layout of x, to some positions of a sharded dim."""
    mesh, placements = layout_of(x)
    axes = dim_axes(mesh, placements, dim)
    local = _return_plan(mesh, axes, dim, x.shape[dim], positions).fetch(local_as(part, mesh, placements))
    start, stop = owners(mesh, axes, x.shape[dim])[coordinate(mesh, axes)]
    own = [position - start for position in _within(positions, start, stop)]
    if own and local.numel():
        _every(x._local_tensor.narrow(dim, own[0], own[-1] - own[0] + 1), dim, positions.step).copy_(local)


def _within(positions: range, start: int, stop: int) -> range:
    """The positions in an interval."""
    a, b = (min(max(0, -(-(at - positions.start) // positions.step)), len(positions)) for at in (start, stop))
    return positions[a:b]


@planned(4096)
def _return_plan(mesh: DeviceMesh, axes: tuple[int, ...], dim: int, extent: int, positions: range) -> Exchange:
    """Fetches for each rank the elements of a part whose positions it owns."""
    needs = []
    for interval in owners(mesh, axes, extent):
        own = _within(positions, *interval)
        first = positions.index(own[0]) if own else 0
        needs.append(window((first, first + len(own)), len(positions)) if own else ())
    return exchange(mesh, axes, dim, owners(mesh, axes, len(positions)), tuple(needs))


@rule("aten::slice_backward")
def slice_backward(
    func: Any, grad: DTensor, shape: list[int], dim: int, start: int | None, stop: int | None, step: int
) -> DTensor:
    """Zeros of ``shape`` with the gradient where the slice was, laid out as the gradient."""
    dim %= len(shape)
    mesh, placements = layout_of(grad)
    own, axes = grad._local_tensor, dim_axes(*layout_of(grad), dim)
    begin, end, _ = slice(start, stop, step).indices(shape[dim])
    if not axes:
        local = local_shape(mesh, placements, _replaced(shape, dim, 1))
        whole = func(own, _replaced(local, dim, shape[dim]), dim, begin, end, step)
        return wrap(whole, mesh, placements, shape)
    which = _slice_plan(mesh, axes, dim, shape[dim], range(begin, end, step))
    wide = own.new_zeros(_replaced(own.shape, dim, which.plan.extent))
    _every(wide, dim, step).copy_(own)
    return wrap(which.adjoint(wide), mesh, placements, shape)


@rule("aten::select.int")
def select(func: Any, x: DTensor, dim: int, index: int) -> DTensor:
    """x[index] along dim; of a sharded dim every rank gets it."""
    dim %= x.dim()
    axes = dim_axes(*layout_of(x), dim)
    if not axes:
        return stock(func, (x, dim, index))
    extent = x.shape[dim]
    if not -extent <= index < extent:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {extent}")
    mesh, placements = layout_of(x)
    row = index % extent
    owned = owners(mesh, axes, extent)
    needs = (window((row, row + 1), extent),) * len(owned)
    local = exchange(mesh, axes, dim, owned, needs).fetch(x._local_tensor).squeeze(dim)
    result = reduced_layout(placements, [dim], False, Replicate())
    write = functools.partial(_row_written, dim, row)
    row_of_x = wrap(local, mesh, result, (*x.shape[:dim], *x.shape[dim + 1 :]))
    return copy_of(row_of_x, x, write, (dim, range(row, row + 1)))


def _row_written(dim: int, row: int, x: DTensor, part: DTensor) -> None:
    """Writes one selection of a sharded dim, which all ranks have, at its owner."""
    mesh, placements = layout_of(x)
    axes = dim_axes(mesh, placements, dim)
    start, stop = owners(mesh, axes, x.shape[dim])[coordinate(mesh, axes)]
    local = local_as(part, mesh, reduced_layout(placements, [dim], False, Replicate()))
    if start <= row < stop:
        x._local_tensor.select(dim, row - start).copy_(local)


@rule("aten::select_backward")
def select_backward(func: Any, grad: DTensor, shape: list[int], dim: int, index: int) -> DTensor:
    """Zeros of ``shape`` with the gradient at the index; the dim is not sharded."""
    dim %= len(shape)
    mesh, placements = layout_of(grad)
    result = tuple(Shard(p.dim + 1) if isinstance(p, Shard) and p.dim >= dim else p for p in placements)
    return wrap(func(grad._local_tensor, local_shape(mesh, result, shape), dim, index), mesh, result, shape)


@rule("aten::split.Tensor", "aten::split_with_sizes", "aten::unbind.int")
def split_slices(func: Any, x: DTensor, *args: Any) -> Sequence[DTensor]:
    """Successive slices along dim, or all of its selections."""
    name = func._schema.name
    sizes, dim = (None, *args, 0)[:2] if name.endswith("unbind") else (*args, 0)[:2]
    dim = dim % x.dim()
    extent = x.shape[dim]
    if not extent and sizes is not None:  # of nothing torch makes one piece, or as many as sizes are named
        return [_alias(x) for _ in (sizes if not isinstance(sizes, int) else [0])]
    if not dim_axes(*layout_of(x), dim):
        return _pieces(func, x, dim, args)
    if sizes is None:
        return [select(func, x, dim, index) for index in range(extent)]
    if isinstance(sizes, int):
        sizes = [min(sizes, extent - start) for start in range(0, max(extent, 1), sizes)]
    if sum(sizes) != extent:
        raise RuntimeError(f"split_with_sizes: sizes {list(sizes)} do not sum to {extent}, the extent of dim {dim}")
    bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    return [slice_of(func, x, dim, a, b) if b - a < extent else _alias(x) for a, b in itertools.pairwise(bounds)]


def _pieces(func: Any, x: DTensor, dim: int, args: Sequence[Any]) -> Sequence[DTensor]:
    """Views of this rank's part, of a dim that is not sharded."""
    mesh, placements = layout_of(x)
    parts = func(x._local_tensor, *args)
    if func._schema.name.endswith("unbind"):
        after = reduced_layout(placements, [dim], False, Replicate())
        shape, strides = (tuple(of[d] for d in range(x.dim()) if d != dim) for of in (x.shape, x.stride()))
        return [wrap_strided(part, mesh, after, shape, strides) for part in parts]
    shapes = [_replaced(x.shape, dim, part.shape[dim]) for part in parts]
    return [wrap_strided(part, mesh, placements, of, x.stride()) for part, of in zip(parts, shapes, strict=True)]


def _alias(x: DTensor) -> DTensor:
    """A view of all of a tensor: autograd requires another object."""
    return wrap_strided(torch.ops.aten.alias.default(x._local_tensor), *layout_of(x), x.shape, x.stride())


@rule("aten::cat")
def concatenate(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> DTensor:
    """The tensors one after another along dim; each axis shards what it shards of the first tensor that it shards."""
    mesh, placements = joined_layout(tensors)
    tensors = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)] or tensors[:1]
    first = tensors[0]
    dim %= first.dim()
    shape = _replaced(first.shape, dim, sum(tensor.shape[dim] for tensor in tensors))
    if any(_replaced(tensor.shape, dim, 0) != _replaced(first.shape, dim, 0) for tensor in tensors):
        raise RuntimeError(f"cat along dim {dim}: {[tuple(tensor.shape) for tensor in tensors]}")
    locals = [local_as(tensor, mesh, placements) for tensor in tensors]
    axes = dim_axes(mesh, placements, dim)
    if axes:
        offset = 0
        for index, tensor in enumerate(tensors):
            locals[index] = _part_of(mesh, axes, dim, shape[dim], offset, tensor.shape[dim]).fetch(locals[index])
            offset += tensor.shape[dim]
    return wrap(torch.cat(locals, dim), mesh, placements, shape)


@planned(4096)
def _part_of(mesh: DeviceMesh, axes: tuple[int, ...], dim: int, whole: int, offset: int, extent: int) -> Exchange:
    """The elements of one tensor that each rank needs of a concatenation."""
    intervals = [(max(a - offset, 0), min(b - offset, extent)) for a, b in owners(mesh, axes, whole)]
    needs = tuple(window((a, b), extent) if b > a else () for a, b in intervals)
    return exchange(mesh, axes, dim, owners(mesh, axes, extent), needs)


def _mapped(x: DTensor, dim: int, index_map: Callable[[int], Need]) -> DTensor:
    """x with the positions of a sharded dim rearranged."""
    mesh, placements = layout_of(x)
    axes = dim_axes(mesh, placements, dim)
    owned, need = owners(mesh, axes, x.shape[dim]), index_map(x.shape[dim])
    which = exchange(mesh, axes, dim, owned, tuple(restricted(need, interval) for interval in owned))
    return wrap(which.fetch(x._local_tensor), mesh, placements, x.shape)


def _local(func: Any, x: DTensor, *args: Any) -> DTensor:
    return wrap(func(x._local_tensor, *args), *layout_of(x), x.shape)


@rule("aten::flip")
def flip(func: Any, x: DTensor, dims: Sequence[int]) -> DTensor:
    """The dims reversed."""
    for dim in {dim % x.dim() for dim in dims}:
        sharded = bool(dim_axes(*layout_of(x), dim))
        x = _mapped(x, dim, lambda n: (Piece(n, n - 1, -1),)) if sharded else _local(func, x, [dim])
    return x


@rule("aten::roll")
def roll(func: Any, x: DTensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> DTensor:
    """The dims shifted, around the end."""
    if not dims and any(dim_axes(*layout_of(x), dim) for dim in range(x.dim())):
        raise refuse(func, "a roll without dims, over a sharded tensor")
    if not dims:
        return _local(func, x, shifts)
    for shift, dim in zip(shifts, dims, strict=True):
        dim %= x.dim()
        if not dim_axes(*layout_of(x), dim):
            x = _local(func, x, [shift], [dim])
        elif by := shift % max(x.shape[dim], 1):
            x = _mapped(x, dim, lambda n, by=by: (Piece(by, n - by), Piece(n - by, 0)))  # type: ignore[misc]
    return x
