"""Views: shards stay where they are if every rank owns the same elements before and after, else one all-to-all moves
them.

A view splits into groups of dims that merge into one another, or divide. A group without a sharded dim, or with one dim
before and after, is local. Where several sharded dims merge, all their axes shard the result, one within the other:
flattening an activation for a linear layer leaves each rank 1/p of the features, from which the layer computes its
partial sum. Where a sharded dim divides, its shard goes to the dim that the mesh axis shards in activations (``height``
to the last but one), else, as in tokens and windows, to those dims of the group with which nothing moves. If a sharded
dim of extent 1 disappears, the result is replicated: every rank gets its element.

The backward of a view divides what its forward merged, and must give the gradient the layout of the forward's input.
The autograd node that computed the input keeps that layout, and the backward finds it there, as its next node.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.rules.registry import rule
from distconv.rules.whole.copies import copy_of
from distconv.settings.partition import AXES, Kind
from distconv.tensors.dtensors import single_dims_in_format, wrap, wrap_strided
from distconv.tensors.layouts import box_at, layout_of, local_shape, refuse_partial, replicated
from distconv.tensors.mesh import axis_names, sharded_dims
from distconv.transfer.local_part import local_as, replicate_single_dims
from distconv.transfer.reshuffle import Layouts, covered_interval, make_reshuffle
from distconv.transfer.tracing import planned

Group = tuple[tuple[int, ...], tuple[int, ...]]  # Dims before, and those after that have as many elements.

_VIEWED = "distconv.viewed"
"""A key of an autograd node's metadata: {number of an output: (mesh, placements and shape)} of viewed tensors."""


@planned(4096)
def whole_size(size: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """The size of a view, -1 filled in. RuntimeError where the elements do not fit."""
    return tuple(torch.empty(elements, device="meta").view(size).shape)


@functools.lru_cache(maxsize=4096)
def dim_groups(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Group, ...]:
    """The smallest runs of dims, before and after, with equal numbers of elements."""
    groups: list[Group] = []
    i = j = 0
    while i < len(before) or j < len(after):
        ins, outs = [i] if i < len(before) else [], [j] if j < len(after) else []
        left, right = before[i] if ins else 1, after[j] if outs else 1
        i, j = i + len(ins), j + len(outs)
        while left != right:
            if (left < right and i < len(before)) or j == len(after):
                left, i, ins = left * before[i], i + 1, [*ins, i]
            else:
                right, j, outs = right * after[j], j + 1, [*outs, j]
        groups.append((tuple(ins), tuple(outs)))
    return tuple(groups)


def _usual(mesh: DeviceMesh, axis: int, dims: Sequence[int], ndim: int) -> int | None:
    """The dim that an axis shards in activations (N, C, up to three of space), if it is one of several."""
    if len(dims) == 1:
        return dims[0]
    row = AXES[axis_names(mesh)[axis]]
    usual = row.dim_of(ndim)
    # Dims of space are the last ones: others follow in tokens (N, positions..., C), and in windows.
    is_activation = 3 <= ndim <= 5 and (row.kind is not Kind.SPACE or dims[-1] == ndim - 1)
    return usual if is_activation and usual in dims and row.kind is not Kind.CHANNELS else None


def _spread(
    mesh: DeviceMesh,
    free: Sequence[int],
    before: Layouts,
    result: list[Placement],
    after: tuple[int, ...],
    group: Group,
) -> None:
    """Lets some axes shard dims that a dim divides into: so that nothing moves, or else no rank is left without any."""
    dims = [dim for dim in group[1] if after[dim] > 1] or group[1][:1]
    for choice in itertools.product(dims, repeat=len(free)):
        for axis, dim in zip(free, choice, strict=True):
            result[axis] = Shard(dim)
        if _keeps(mesh, before, (tuple(result), after), group):
            return
    parts = {
        dim: math.prod(mesh.size(axis) for axis, p in enumerate(result) if p == Shard(dim) and axis not in free)
        for dim in dims
    }
    for axis in free:
        even = (dim for dim in dims if after[dim] % (parts[dim] * mesh.size(axis)) == 0)
        dim = next(even, max(dims, key=lambda dim: after[dim] // parts[dim]))
        result[axis], parts[dim] = Shard(dim), parts[dim] * mesh.size(axis)


@functools.lru_cache(maxsize=4096)
def view_layout(
    mesh: DeviceMesh, before: Layouts, after: tuple[int, ...], wanted: tuple[Placement, ...] | None
) -> tuple[Placement, ...]:
    """The layout of a view. A sharded dim that divides goes where ``wanted`` has its axis, if that is a choice."""
    placements, shape = before
    result = list(placements)
    for ins, outs in dim_groups(shape, after):
        sharded = [axis for axis, dim in sharded_dims(mesh, placements) if dim in ins]
        if not sharded:
            continue
        free = []
        for axis in sharded:
            there = None if wanted is None else wanted[axis]
            usual = there.dim if isinstance(there, Shard) and there.dim in outs else None
            usual = _usual(mesh, axis, outs, len(after)) if usual is None else usual
            if usual is None:
                free.append(axis)
            else:
                result[axis] = Shard(usual)
        if free:
            _spread(mesh, free, before, result, after, (ins, outs))
    return tuple(result)


@functools.lru_cache(maxsize=4096)
def _merges(mesh: DeviceMesh, before: Layouts, after: tuple[int, ...]) -> bool:
    """Whether several dims, some of them sharded, become others: the view back has a choice of dims to shard."""
    dims = {dim for _, dim in sharded_dims(mesh, before[0])}
    return any(len(ins) > 1 and not dims.isdisjoint(ins) for ins, _ in dim_groups(before[1], after))


def _remember(x: DTensor, shape: tuple[int, ...]) -> None:
    """Remember the layout of a view's input, for the view's backward."""
    node: Any = x.grad_fn
    if node is not None:
        mesh, placements = layout_of(x)
        node.metadata.setdefault(_VIEWED, {})[x.output_nr] = mesh, tuple(placements), shape


def _remembered(mesh: DeviceMesh, shape: tuple[int, ...]) -> tuple[Placement, ...] | None:
    """In the backward of a view the layout of the view's input, whose gradient is being computed; else None."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    if node is None or not node.next_functions:
        return None
    source: Any = node.next_functions[0][0]
    if source is None:
        return None
    leaf = getattr(source, "variable", None)
    if leaf is not None:
        found = (*layout_of(leaf), tuple(leaf.shape)) if isinstance(leaf, DTensor) else None
    else:
        found = source.metadata.get(_VIEWED, {}).get(node.next_functions[0][1])
    return found[1] if found is not None and (found[0], found[2]) == (mesh, shape) else None


@functools.lru_cache(maxsize=4096)
def _stays(mesh: DeviceMesh, before: Layouts, after: Layouts) -> bool:
    """Whether every rank owns the same elements before and after."""
    return all(_keeps(mesh, before, after, group) for group in dim_groups(before[1], after[1]))


def _keeps(mesh: DeviceMesh, before: Layouts, after: Layouts, group: Group) -> bool:
    """The same as `_stays` for one group of dims."""
    ins, outs = group
    axes = [axis for axis, dim in sharded_dims(mesh, before[0]) if dim in ins and mesh.size(axis) > 1]
    if not axes or (len(ins) == len(outs) == 1):
        return True
    # Axes of other groups may not have got their new dims yet.
    of_before, of_after = (
        tuple(p if axis in axes else Replicate() for axis, p in enumerate(layout)) for layout in (before[0], after[0])
    )
    for coordinates in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
        at = dict(zip(axes, coordinates, strict=True))
        here = [at.get(axis, 0) for axis in range(mesh.ndim)]
        runs = []
        for layout, shape, dims in ((of_before, before[1], ins), (of_after, after[1], outs)):
            box = box_at(mesh, layout, shape, here)
            runs.append(covered_interval([box[dim] for dim in dims], [shape[dim] for dim in dims]))
        if runs[0] is None or runs[0] != runs[1]:
            return False
    return True


@functools.lru_cache(maxsize=4096)
def _rows(mesh: DeviceMesh, before: Layouts, after: Layouts) -> tuple[Layouts, Layouts, int]:
    """The layouts without the last dims that are not sharded, and the number of elements of these dims."""
    sharded = [{dim for _, dim in sharded_dims(mesh, layout)} for layout, _ in (before, after)]
    shape, ends, row = before[1], [len(before[1]), len(after[1])], 1
    for ins, outs in reversed(dim_groups(shape, after[1])):
        if sharded[0].intersection(ins) or sharded[1].intersection(outs):
            break
        ends, row = [ends[0] - len(ins), ends[1] - len(outs)], row * math.prod(shape[dim] for dim in ins)
    return (before[0], shape[: ends[0]]), (after[0], after[1][: ends[1]]), row


@rule("aten::view", "aten::_unsafe_view", "aten::_reshape_alias", "aten::reshape")
def view(func: Any, x: DTensor, size: Sequence[int], *_: Any) -> DTensor:
    """x with another shape of as many elements."""
    before, after = tuple(x.shape), whole_size(tuple(size), x.numel())
    if not math.prod(before):
        return _empty_view(x, before, after)
    given, x = x, replicate_single_dims(x, _vanishing(before, after))
    mesh, placements = x.device_mesh, tuple(x.placements)
    layout = placements, before
    result = view_layout(mesh, layout, after, _remembered(mesh, after))
    if _merges(mesh, layout, after):
        _remember(x, before)
    local = x._local_tensor
    moves = not _stays(mesh, layout, (result, after))
    if moves:
        refuse_partial(func, placements, f"what it views as {after}, a tensor {before},")
        from_rows, to_rows, row = _rows(mesh, layout, (result, after))
        local = make_reshuffle(mesh, from_rows, to_rows).fetch(local, row)
    part = single_dims_in_format(local.reshape(local_shape(mesh, result, after)), after)
    y = wrap(part, mesh, result, after)
    if "unsafe" in func._schema.name or (func._schema.name == "aten::reshape" and _view_of(given, after) is None):
        return y  # in one process it is a copy, too
    if not moves and x is given and _view_of(local, tuple(part.shape)) is not None:
        if y._local_tensor is part:
            return y
        strides = _view_of(x, after)
        if strides is not None:
            return wrap_strided(part, mesh, result, after, strides)
    return copy_of(y, given, functools.partial(_written, placements, moves))


def _view_of(x: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a view of ``x``, by its own; None where a view has none, as of a part."""
    return _view_strides(tuple(x.shape), x.stride(), shape)


@planned(maxsize=4096)
def _view_strides(before: tuple[int, ...], strides: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return torch.empty_strided(before, strides, device="meta").view(after).stride()
    except RuntimeError:
        return None


def _written(placements: tuple[Placement, ...], moves: bool, x: DTensor, y: DTensor) -> None:
    """Writes a view of x that moved shards, or elements of dims of extent 1, back to x; x was viewed as placed so."""
    mesh, shape, local = x.device_mesh, tuple(x.shape), y._local_tensor
    if moves:
        local = make_reshuffle(mesh, (placements, shape), (tuple(y.placements), tuple(y.shape))).adjoint(local)
    local = local.reshape(local_shape(mesh, placements, shape))
    x._local_tensor.copy_(local_as(wrap(local, mesh, placements, shape), mesh, x.placements))


@functools.lru_cache(maxsize=4096)
def _vanishing(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """The dims, of extent 1, that become none."""
    return tuple(dim for ins, outs in dim_groups(before, after) if not outs for dim in ins)


def _empty_view(x: DTensor, before: tuple[int, ...], after: tuple[int, ...]) -> DTensor:
    """Without elements nothing moves, so any layout will do."""
    mesh, placements = layout_of(x)
    result = tuple(placements) if before == after else replicated(mesh)
    return wrap(x._local_tensor.new_empty(local_shape(mesh, result, after)), mesh, result, after)
