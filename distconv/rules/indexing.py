"""Reading and writing at indices of a dim, and through masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from distconv.dtensors import wrap
from distconv.layouts import added_up, layout, replicated
from distconv.refusal import UnsupportedOperation, refuse
from distconv.rules.along import Meeting, computed_along, layout_beside
from distconv.rules.elementwise import sharding
from distconv.rules.losses import common_layout
from distconv.rules.operands import part_of
from distconv.rules.registry import rule
from distconv.rules.small import small_or_refused
from distconv.rules.stock import stock
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import moved

ALONG = Meeting(lambda arguments, _: [arguments["dim"]])
"""Elements meet along the dim that the indices count."""


@rule("aten::index_add", "aten::index_add_")
def index_add(func: Any, x: DTensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> DTensor:
    """Adds slices of source at the indices of a dim that is not sharded."""
    mesh, placements = common_layout(source, x, index)
    dim %= max(x.dim(), 1)
    in_place = func._schema.name.endswith("_")
    if any(isinstance(p, Shard) and p.dim == dim for p in (*placements, *getattr(x, "placements", ()))):
        if in_place and (not isinstance(x, DTensor) or x.placements not in (placements, replicated(mesh))):
            raise refuse(func, f"its dim {dim} is sharded: {placements}")
        added = computed_along(torch.ops.aten.index_add.default, (x, dim, index, source), {"alpha": alpha}, ALONG)
        return _became(x, added) if in_place else added
    numbers = local_as(index, mesh, replicated(mesh))
    local = func(local_as(x, mesh, placements), dim, numbers, local_as(source, mesh, placements), alpha=alpha)
    result = wrap(local, mesh, placements, x.shape)
    return result if not in_place else x if x.placements == placements else _became(x, result)


def _became(x: DTensor, result: DTensor) -> DTensor:
    """x with the elements of a result. As the backward of index_select does with fresh zeros: from now on in shards."""
    if x.placements == result.placements:
        x._local_tensor.copy_(result._local_tensor)
    else:
        x._local_tensor, x._spec = result._local_tensor, result._spec
    return x


@rule("aten::index_select")
def index_select(func: Any, x: DTensor, dim: int, index: Tensor) -> DTensor:
    """Slices at the indices of a dim that is not sharded."""
    if not isinstance(x, DTensor):
        return small_or_refused(func, (x, dim, index), {}, "indices of a plain tensor are sharded")
    mesh, placements = common_layout(x)
    dim %= max(x.dim(), 1)
    if any(isinstance(p, Shard) and p.dim == dim and mesh.size(a) > 1 for a, p in enumerate(placements)):
        return computed_along(func, (x, dim, index), {}, ALONG)
    local = func(local_as(x, mesh, placements), dim, local_as(index, mesh, replicated(mesh)))
    return wrap(local, mesh, placements, (*x.shape[:dim], index.numel(), *x.shape[dim + 1 :]))


@rule("aten::scatter.src", "aten::scatter.value", "aten::scatter_add")
def scatter(func: Any, x: Tensor, dim: int, index: Tensor, source: Any) -> DTensor:
    """x with the elements of source, or one number, at the indices of a dim that is not sharded."""
    if len({tensor.dim() for tensor in (x, index, source) if isinstance(tensor, Tensor)}) > 1:
        return small_or_refused(func, (x, dim, index, source), {}, "its tensors differ in their number of dims")
    dim %= max(x.dim(), 1)
    tensors = [tensor for tensor in (index, source, x) if isinstance(tensor, Tensor)]
    mesh, placements = sharding(tensors, x.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and mesh.size(axis) > 1:
            alike = {tensor.shape[placement.dim] for tensor in tensors}
            if placement.dim == dim or len(alike) > 1:
                return computed_along(func, (x, dim, index, source), {}, ALONG)
    locals = [part_of(each, mesh, placements) if isinstance(each, Tensor) else each for each in (x, index, source)]
    return wrap(func(locals[0], dim, *locals[1:]), mesh, placements, x.shape)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _beside(x: DTensor, indices: Sequence[Tensor | None]) -> tuple[Placement, ...] | None:
    """The layout in which no dim of x is sharded that indices count; None without one."""
    counted = frozenset(dim for dim, index in enumerate(indices) if index is not None)
    return layout_beside(x.device_mesh, added_up(x.placements), tuple(x.shape), counted)


@rule("aten::index.Tensor")
def index_of(func: Any, x: Tensor, indices: Sequence[Tensor | None]) -> DTensor:
    """Indexing by numbers is DTensor's own, of dims that are not sharded: their shards go to other dims first.

    By a mask a result has as many elements as all shards together select.
    """
    given = (x, indices)
    if any(_is_mask(index) for index in indices):
        why = "by a mask; accepted: torch.where, masked_fill, or multiplication by the mask"
        return small_or_refused(func, given, {}, why)
    if isinstance(x, DTensor):
        beside = _beside(x, indices)
        if beside is None:
            return small_or_refused(func, given, {}, "all of its dims that could be sharded are counted by indices")
        x = moved(x, x.device_mesh, beside)
    try:
        return stock(func, (x, indices))
    except UnsupportedOperation as error:
        return small_or_refused(func, given, {}, error)


@rule("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
def assign(func: Any, x: DTensor, indices: Sequence[Tensor | None], values: Tensor, *rest: Any) -> DTensor:
    """x[numbers] = values, and x[mask] = number, on every shard."""
    in_place = func._schema.name.endswith("_")
    if not any(_is_mask(index) for index in indices):
        return _put(func, x, indices, values, *rest)
    (mask, *others) = indices
    if others or mask is None or values.numel() != 1 or (rest and rest[0]) or mask.shape != x.shape:
        why = "through a mask; accepted: a mask of the tensor's shape and one number"
        return small_or_refused(func, (x, indices, values, *rest), {}, why)
    mesh, placements = layout(x)
    number = local_as(values, mesh, replicated(mesh)).reshape(())
    operation = Tensor.masked_fill_ if in_place else Tensor.masked_fill
    local = operation(x._local_tensor, local_as(mask, mesh, placements), number)
    return x if in_place else wrap(local, mesh, placements, x.shape)


def _put(func: Any, x: DTensor, indices: Sequence[Tensor | None], values: Tensor, *rest: Any) -> DTensor:
    """x[numbers] = values by DTensor's own rule, where the dims that indices count are not sharded."""
    in_place = func._schema.name.endswith("_")
    beside = _beside(x, indices) if isinstance(x, DTensor) else None
    if isinstance(x, DTensor) and beside is None:
        why = "all of its dims that could be sharded are counted by indices"
        return small_or_refused(func, (x, indices, values, *rest), {}, why)
    sharded = isinstance(values, DTensor) and any(placement.is_shard() for placement in values.placements)
    if not sharded and (beside is None or beside == tuple(x.placements)):
        try:
            result = stock(func, (x, indices, values, *rest))
            return x if in_place else result
        except UnsupportedOperation as error:
            return small_or_refused(func, (x, indices, values, *rest), {}, error)
    new = torch.ops.aten.index_put.default
    try:
        laid = x if beside is None else moved(x, x.device_mesh, beside)
        result = stock(new, (laid, indices, values, *rest[:1]))
    except UnsupportedOperation as error:
        return small_or_refused(func, (x, indices, values, *rest), {}, error)
    if not in_place:
        return result
    x._local_tensor.copy_(moved(result, x.device_mesh, x.placements)._local_tensor)
    return x
