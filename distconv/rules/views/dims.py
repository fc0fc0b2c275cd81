"""Operators that insert, remove, repeat and reorder dims, views by strides, and views in place.

If a removed dim of extent 1 was sharded, the result is replicated: its one element is sent to all ranks
(``broadcasting``). Strides refer to the elements in one process's memory: views by them are of whole tensors, which a
rank has in memory as one process does if they are no views of others, and of small ones, gathered. Formulas of backward
write to such views of new tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import return_and_correct_aliasing

from distconv.rules.operands.layouts import canonical_dims, reduced_layout
from distconv.rules.operands.sums import settled
from distconv.rules.registry import rule
from distconv.rules.schemas import name_of, named_arguments
from distconv.rules.views.padding import restricted
from distconv.rules.views.slices import concatenate
from distconv.rules.whole import permit, undone
from distconv.rules.whole.copies import copy_of
from distconv.tensors.dtensors import rewrap, wrap, wrap_strided
from distconv.tensors.layouts import dim_axes, has_partial, layout_of, local_shape, owners, replicated
from distconv.tensors.refusal import refuse
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.local_part import local_as, replicate_single_dims
from distconv.transfer.needs import Piece
from distconv.transfer.redistribution import added, redistributed_data
from distconv.transfer.tracing import is_traced, planned

aten = torch.ops.aten


@rule("aten::squeeze", "aten::squeeze.dim", "aten::squeeze.dims")
def squeeze(func: Any, x: DTensor, dims: int | Sequence[int] | None = None) -> DTensor:
    """x without some of its dims of extent 1."""
    named = () if isinstance(dims, Sequence) and not dims else canonical_dims(dims, x.dim())
    gone = [dim for dim in named if x.shape[dim] == 1]
    here = replicate_single_dims(x, gone)
    mesh, placements = layout_of(here)
    after = reduced_layout(placements, gone, False, Replicate())
    left = [dim for dim in range(x.dim()) if dim not in gone]
    local = here._local_tensor
    local = local.squeeze(gone) if gone else aten.alias.default(local)
    strides = [x.stride(dim) for dim in left]
    y = wrap_strided(local, mesh, after, [x.shape[dim] for dim in left], strides)
    return y if here is x else copy_of(y, x, functools.partial(_written, gone, placements))


def _written(gone: Sequence[int], placements: Sequence[Placement], x: DTensor, y: DTensor) -> None:
    """Writes x without some dims of extent 1, all of which every rank has, back to x."""
    local = y._local_tensor
    for dim in gone:
        local = local.unsqueeze(dim)
    x._local_tensor.copy_(local_as(wrap(local, x.device_mesh, placements, x.shape), x.device_mesh, x.placements))


@rule("aten::expand")
def expand(func: Any, x: DTensor, size: Sequence[int], *, implicit: bool = False) -> DTensor:
    """x with dims of extent 1 repeated, and new ones before them. A partial sum is added up before it grows."""
    if has_partial(x.placements):
        local, (mesh, placements) = settled(func, x)
        x = wrap(local, mesh, placements, x.shape)
    whole = torch.empty_strided(x.shape, x.stride(), device="meta").expand(size)  # RuntimeError as in one process
    shape, strides = tuple(whole.shape), whole.stride()
    new = len(shape) - x.dim()
    here = replicate_single_dims(x, [dim for dim in range(x.dim()) if x.shape[dim] == 1 != shape[dim + new]])
    mesh, placements = x.device_mesh, _shifted(x.placements, new)
    y = wrap_strided(here._local_tensor.expand(local_shape(mesh, placements, shape)), mesh, placements, shape, strides)
    return y if here is x else copy_of(y, x)


def _shifted(placements: Sequence[Placement], by: int) -> tuple[Placement, ...]:
    return tuple(Shard(p.dim + by) if isinstance(p, Shard) else p for p in placements)


@rule("aten::repeat")
def repeat(func: Any, x: DTensor, repeats: Sequence[int]) -> DTensor:
    """x several times along each dim, and along new ones before them; laid out as x is."""
    shape = tuple(torch.empty(x.shape, device="meta").repeat(repeats).shape)
    new = len(shape) - x.dim()
    local, (mesh, placements) = settled(func, x)
    own = list(repeats)
    for dim in range(x.dim()):
        axes = dim_axes(mesh, placements, dim)
        if axes and repeats[new + dim] != 1:
            local = _repetition(mesh, axes, dim, x.shape[dim], repeats[new + dim]).fetch(local)
            own[new + dim] = 1
    return wrap(local.repeat(own), mesh, _shifted(placements, new), shape)


@planned(1024)
def _repetition(mesh: DeviceMesh, axes: tuple[int, ...], dim: int, extent: int, times: int) -> Exchange:
    """The exchange that fetches a rank's interval of a dim that is repeated several times."""
    whole = (Piece(times, 0, 0),) if extent == 1 else (Piece(extent, 0),) * times
    needs = tuple(restricted(whole, interval) for interval in owners(mesh, axes, extent * times))
    return exchange(mesh, axes, dim, owners(mesh, axes, extent), needs)


@rule(
    *("aten::squeeze_", "aten::squeeze_.dim", "aten::squeeze_.dims"),
    *("aten::unsqueeze_", "aten::t_", "aten::transpose_"),
)
def view_in_place(func: Any, x: DTensor, *args: Any) -> DTensor:
    """x itself becomes the view."""
    y = getattr(aten, name_of(func).removesuffix("_"))(x, *args)
    x._local_tensor, x._spec = y._local_tensor, y._spec
    return return_and_correct_aliasing(func, (x, *args), {}, x)


@rule("aten::set_.source_Tensor")
def set_data(func: Any, x: DTensor, source: Tensor) -> DTensor:
    """x has the memory of the source from now on, in the layout that it has."""
    if not isinstance(x, DTensor) or x.shape != source.shape or x.dtype != source.dtype:
        why = (
            f"{tuple(x.shape)}, {x.dtype}, of {tuple(source.shape)}, {source.dtype}; accepted: two distributed ones of"
        )
        raise refuse(func, f"{why} one shape and dtype", whole_helps=False)
    local = local_as(source, *layout_of(x))
    if is_traced(x._local_tensor):  # In a graph, x is another tensor than the parameter, with the same memory.
        x._local_tensor.copy_(local)
        return x
    y = wrap(local, *layout_of(x), x.shape)
    x._local_tensor, x._spec = y._local_tensor, y._spec
    return x


@rule("aten::detach", "aten::alias")
def same(func: Any, x: DTensor) -> DTensor:
    """x without its graph."""
    return rewrap(func(x._local_tensor), x)


@rule("aten::t", "aten::transpose.int", "aten::permute")
def permuted(func: Any, x: DTensor, *args: Any) -> DTensor:
    """x with its dims in another order."""
    local = func(x._local_tensor, *args)  # which raises where a dim is none
    order = _order(func, x.dim(), *(tuple(arg) if isinstance(arg, list) else arg for arg in args))
    after = [type(p)(order.index(p.dim)) if isinstance(p, Shard) else p for p in x.placements]
    shape, strides = ([of[dim] for dim in order] for of in (x.shape, x.stride()))
    return wrap_strided(local, x.device_mesh, after, shape, strides)


@planned(4096)
def _order(func: Any, ndim: int, *args: Any) -> tuple[int, ...]:
    """The dims in the order in which an operator gives them, by a tensor whose extents are the numbers of its dims."""
    return tuple(func(torch.empty(tuple(range(ndim)), device="meta"), *args).shape)


@rule("aten::unsqueeze")
def unsqueeze(func: Any, x: DTensor, dim: int) -> DTensor:
    """x with one more dim, of extent 1."""
    local = func(x._local_tensor, dim)
    dim %= local.dim()
    shape, strides = list(x.shape), list(x.stride())
    after = [Shard(p.dim + 1) if isinstance(p, Shard) and p.dim >= dim else p for p in x.placements]
    strides.insert(dim, shape[dim] * strides[dim] if dim < x.dim() else 1)
    shape.insert(dim, 1)
    return wrap_strided(local, x.device_mesh, after, shape, strides)


@rule("aten::stack")
def stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> DTensor:
    """Numbers on several meshes are equal on all ranks once their partial sums are added."""
    distributed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    mesh = distributed[0].device_mesh
    if all(tensor.device_mesh == mesh for tensor in distributed):
        (dim,) = canonical_dims(dim, tensors[0].dim() + 1)
        return concatenate(func, [aten.unsqueeze(tensor, dim) for tensor in tensors], dim)
    if any(tensor.dim() for tensor in tensors):
        raise refuse(func, f"tensors on two meshes: {dict.fromkeys(t.device_mesh for t in distributed)}")
    numbers = [added(tensor)._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return wrap(torch.stack(numbers, dim), mesh, replicated(mesh), (len(numbers),))


@rule("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter")
def strided(func: Any, *args: Any, **kwargs: Any) -> DTensor:
    """Whole on every rank: a view of a whole tensor, and of what was gathered where it is sharded and small."""
    arguments = named_arguments(func, args, kwargs)
    x = arguments["self"]
    if arguments["storage_offset"] and (x._base is not None or x.is_inference()):
        why = "positions in the memory of a tensor that may be a view of another; accepted: no offset"
        raise refuse(func, why, whole_helps=False)
    distributed = [value for value in arguments.values() if isinstance(value, DTensor)]
    permit(func, distributed, "its strides are those of the whole tensor's memory; accepted: slices, select, unfold")
    mesh = distributed[0].device_mesh
    given = {name: _whole(value) if isinstance(value, DTensor) else value for name, value in arguments.items()}
    result = func(**given)
    y = wrap_strided(result, mesh, replicated(mesh), result.shape, result.stride())

    def write(x: DTensor, view: DTensor) -> None:
        own = _whole(x)
        func(**given | {"self": own}).copy_(view._local_tensor)
        x._local_tensor.copy_(local_as(own, mesh, x.placements))

    return copy_of(y, x, write) if isinstance(x, DTensor) and undone(x) else y


def _whole(x: DTensor) -> Tensor:
    """The whole tensor, in memory as one process has it."""
    if not undone(x):
        return added(x)._local_tensor
    whole = redistributed_data(x, x.device_mesh, replicated(x.device_mesh))._local_tensor
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=whole.device).copy_(whole)
