"""Reading and writing at indices of a dim, and through masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from distconv.rules.indexing.lookup import read, write_at
from distconv.rules.operands.layouts import common_layout, part_of
from distconv.rules.reductions.along import ALONG, computed_along
from distconv.rules.registry import rule
from distconv.rules.stock import leave
from distconv.rules.whole import MOST_BYTES, undone, whole_beside, whole_or_refused, whole_value
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import added_up, has_partial, replicated
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import redistributed_data


@rule("aten::index_add", "aten::index_add_")
def index_add(func: Any, x: Any, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """Adds slices of source at the indices of a dim."""
    in_place = func._schema.name.endswith("_")
    if not isinstance(x, DTensor) and in_place:
        return x.copy_(whole_beside(func, torch.index_add(x, dim, index, source, alpha=alpha)))
    arguments = x, dim, _whole_index(index), source
    added: DTensor = computed_along(torch.ops.aten.index_add.default, arguments, {"alpha": alpha}, ALONG)
    return _became(x, added) if in_place else added


@rule("aten::index_select")
def index_select(func: Any, x: Tensor, dim: int, index: Tensor) -> Any:
    """Slices at the indices of a dim."""
    return computed_along(func, (x, dim, _whole_index(index) if isinstance(x, DTensor) else index), {}, ALONG)


def _whole_index(index: Tensor) -> Tensor:
    """Indices of a dim, all of them on every rank."""
    return part_of(index, index.device_mesh, replicated(index.device_mesh)) if isinstance(index, DTensor) else index


def _became(x: DTensor, result: DTensor) -> DTensor:
    """x with the elements of a result. As the backward of index_select does with fresh zeros: from now on in shards."""
    if x.placements == result.placements or any(isinstance(p, Shard) for p in x.placements):
        x._local_tensor.copy_(redistributed_data(result, x.device_mesh, x.placements)._local_tensor)
    else:
        x._local_tensor, x._spec = result._local_tensor, result._spec
    return x


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _numbered(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """The indices with numbers in place of masks, where every rank has all of the masks' dims of x, and the masks, or
    can get them as they are small. Collective."""
    if not isinstance(x, DTensor):
        return None
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or not _is_mask(index):
            found.append(index)
            continue
        dims = range(len(found), len(found) + index.dim())
        if any(isinstance(p, Shard) and p.dim in dims for p in x.placements):
            return None
        if isinstance(index, DTensor):
            if undone(index) and index.numel() > MOST_BYTES:
                return None
            index = whole_value("a mask", index)
        found += index.nonzero().unbind(1)
    return found


@rule("aten::index.Tensor")
def index_of(func: Any, x: Tensor, indices: Sequence[Tensor | None]) -> DTensor:
    """x at some numbers; by a mask a result has as many elements as all shards together select."""
    if any(_is_mask(index) for index in indices):
        numbers = _numbered(x, indices)
        if numbers is None:
            why = "by a mask; accepted: torch.where, masked_fill, or multiplication by the mask"
            return whole_or_refused(func, (x, indices), {}, why)
        indices = numbers
    return read(func, x, indices)


@rule("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
def index_put(func: Any, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *rest: Any) -> Tensor:
    """x[numbers] = values, and x[mask] = number, on every shard."""
    in_place = func._schema.name.endswith("_")
    if not any(_is_mask(index) for index in indices):
        return write_at(func, x, indices, values, *rest)
    (mask, *others) = indices
    numbers = None if mask is not None and mask.shape == x.shape else _numbered(x, indices)
    if numbers is not None:
        return write_at(func, x, numbers, values, *rest)
    if others or mask is None or values.numel() != 1 or (rest and rest[0]) or mask.shape != x.shape:
        why = "through a mask; accepted: a mask of the tensor's shape and one number"
        return whole_or_refused(func, (x, indices, values, *rest), {}, why)
    mesh, placements = common_layout(x if isinstance(x, DTensor) else mask, values)
    if isinstance(x, DTensor):
        placements = added_up(x.placements)
    number = local_as(values, mesh, replicated(mesh)).reshape(())
    filled = local_as(x, mesh, placements).masked_fill(local_as(mask, mesh, placements), number)
    result = wrap(filled, mesh, placements, x.shape)
    if not in_place:
        return result
    return _became(x, result) if isinstance(x, DTensor) else x.copy_(whole_beside(func, result))


@rule("aten::embedding_dense_backward")
def embedding_backward(
    func: Any, grad: Tensor, indices: Tensor, count: int, padding: int, scale_by_frequency: bool
) -> Tensor:
    """The gradient of a table, as DTensor computes it, over how often all ranks together have read each row."""
    if isinstance(grad, DTensor) and isinstance(indices, DTensor) and not has_partial(grad.placements):
        beside = tuple(
            p if isinstance(p, Shard) and p.dim < indices.dim() else Replicate() for p in grad.placements
        )  # Indices that were flattened, and are viewed as a map again, may be sharded along another dim of space.
        indices = redistributed_data(indices, grad.device_mesh, beside)
    total: Tensor = leave(func, grad, indices, count, padding, False)
    if not scale_by_frequency:
        return total
    once = torch.ones_like(indices, dtype=torch.promote_types(grad.dtype, torch.float32)).unsqueeze(-1)
    times = func(once, indices, count, padding, False)
    return (total / times.clamp(min=1)).to(grad.dtype)
