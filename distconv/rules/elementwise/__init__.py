"""Elementwise operators for which DTensor has no strategy, or a wrong one; triangles of matrices, and new tensors.

Beside them conversions to another form of the same numbers: conjugates, pairs of real numbers, oneDNN's layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from distconv.rules.operands.layouts import aligned, sharding
from distconv.rules.registry import above_autograd, rule
from distconv.rules.stock import has_strategy, stock
from distconv.rules.whole import whole_beside, whole_or_refused
from distconv.rules.whole.copies import copy_of
from distconv.tensors.dtensors import CHANNELS_LAST, local_of, wrap
from distconv.tensors.layouts import has_partial, input_layout, layout_of, local_box, refuse_partial, replicated
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import added

OPERATORS = (
    *("leaky_relu_backward", "elu_backward", "mish_backward", "softplus_backward", "hardtanh_backward"),
    *("hardswish_backward", "hardsigmoid_backward", "log_sigmoid_forward", "log_sigmoid_backward", "_prelu_kernel"),
    *("_prelu_kernel_backward", "rrelu_with_noise_backward", "hardshrink_backward", "softshrink_backward"),
    *("masked_fill.Tensor", "isclose", "complex", "polar", "floor_divide", "rsub.Tensor"),
    *("mul.Scalar", "div.Scalar", "hardswish"),
    # For these torch 2.11's DTensor would gather a dim shorter than the axis of a tensor alone, too.
    *("leaky_relu", "elu", "celu", "hardsigmoid", "hardtanh", "threshold"),
    *("mish", "softplus", "softshrink", "hardshrink"),
)
"""Operators that torch does not call pointwise, or that have one tensor; `distconv.rules.fallback` finds all others.

They may have a replicated operand beside a sharded one: DTensor would gather a dim shorter than the axis.
"""

MAYBE_EMPTY = ("aten::log_sigmoid_backward", "aten::rrelu_with_noise_backward")
"""Their last tensor may be a stand-in without elements, which broadcasts to nothing."""


@rule(*(f"aten::{name}" for name in OPERATORS))
def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Local, on the layout of the sharded tensors."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    distributed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if any(has_partial(tensor.placements) for tensor in distributed):
        if has_strategy(func) and not any(_is_needed_whole(tensor, distributed) for tensor in distributed):
            return stock(func, args, kwargs)
        return elementwise(func, *(added(arg) if isinstance(arg, DTensor) else arg for arg in args), **kwargs)
    mesh, placements = layout_of(distributed[0])
    shape = distributed[0].shape
    if len(distributed) == len(tensors) and all(
        other.placements == placements and other.shape == shape and other.device_mesh == mesh for other in distributed
    ):
        locals = [local_of(arg) for arg in args]
    else:
        absent = [t for t in tensors[1:] if tuple(t.shape) == (0,)] if func._schema.name in MAYBE_EMPTY else ()
        present = [tensor for tensor in tensors if not any(tensor is other for other in absent)]
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in present))
        mesh, placements = sharding(present, shape)
        locals = [
            aligned(arg, mesh, placements, shape)
            if isinstance(arg, Tensor) and not any(arg is other for other in absent)
            else local_of(arg)
            for arg in args
        ]
    is_whole = all(placement.is_replicate() for placement in placements)
    result = _compact(func, locals, kwargs, shape) if is_whole else func(*locals, **kwargs)
    if isinstance(result, tuple):
        return tuple(
            wrap(part, mesh, placements, shape)
            if part.shape == result[0].shape
            else wrap(part, mesh, replicated(mesh), part.shape)
            for part in result
        )
    return wrap(result, mesh, placements, shape)


def _is_needed_whole(x: DTensor, tensors: Sequence[DTensor]) -> bool:
    """Whether x is a partial sum that its axes cannot scatter as they shard another tensor.

    It repeats along that dim, such as the sum of a row, or the dim's parts differ: DTensor would gather a dim shorter
    than the axis, and a rank that gets nothing of a compiled graph's reduce-scatter would leave it out. Beside one that
    is replicated along its axes, DTensor would gather what is sharded along others.
    """
    return any(
        other.dim() - along.dim > x.dim()
        or x.shape[along.dim - other.dim()] == 1
        or x.shape[along.dim - other.dim()] % math.prod(_sizes(other, along)) != 0
        if isinstance(along, Shard)
        else along.is_replicate() and other.dim() and any(p.is_shard() for p in (*x.placements, *other.placements))
        for other in tensors
        if other.device_mesh == x.device_mesh
        for own, along in zip(x.placements, other.placements, strict=True)
        if own.is_partial()
    )


def _sizes(x: DTensor, along: Placement) -> Iterator[int]:
    """The sizes of the mesh axes with a placement."""
    return (x.device_mesh.size(axis) for axis, p in enumerate(x.placements) if p == along)


def _compact(func: Any, locals: list[Any], kwargs: dict[str, Any], shape: Sequence[int]) -> Any:
    """Computes repeated elements once: the gradient of a mean, expanded to a whole activation, stays one number."""
    tensors = [arg for arg in locals if isinstance(arg, Tensor)]
    repeated = [
        dim
        for dim in range(-len(shape), 0)
        if shape[dim] > 1 and all(t.dim() < -dim or t.shape[dim] == 1 or not t.stride(dim) for t in tensors)
    ]
    if not repeated:
        return func(*locals, **kwargs)
    for index, arg in enumerate(locals):
        if isinstance(arg, Tensor):
            for dim in repeated:
                arg = arg.narrow(dim, 0, 1) if arg.dim() >= -dim else arg
            locals[index] = arg
    result = func(*locals, **kwargs)
    if isinstance(result, tuple):
        return tuple(part.expand(shape) for part in result)
    return result.expand(shape)


IN_PLACE = (
    *("masked_fill_.Scalar", "masked_fill_.Tensor", "copy_", "gcd_", "lcm_", "heaviside_", "__irshift__.Tensor"),
    *(f"{name}_.Tensor" for name in ("copysign", "floor_divide", "eq", "ne", "lt", "le", "gt", "ge")),
    *(f"{name}_" for name in ("leaky_relu", "elu", "celu", "silu", "mish", "threshold", "clamp_min", "clamp_max")),
    *("hardsigmoid_", "hardtanh_", "hardswish_"),
)
"""Of these, too, the others are found."""


@rule(*(f"aten::{name}" for name in IN_PLACE))
def in_place(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Local, on the layout of x; a plain x gets what the whole tensors give."""
    if not isinstance(x, DTensor):
        func(x, *[whole_beside(func, arg) for arg in args], **kwargs)
        return x
    if any(has_partial(t.placements) for t in (x, *args) if isinstance(t, DTensor)):
        stock(func, (x, *args), kwargs)
        return x
    mesh, placements = layout_of(x)
    for arg in args:
        if isinstance(arg, Tensor) and arg.shape != x.shape and torch.broadcast_shapes(arg.shape, x.shape) != x.shape:
            raise RuntimeError(f"{func}: a tensor {tuple(arg.shape)} does not broadcast to {tuple(x.shape)}")
    locals = [aligned(arg, mesh, placements, x.shape) if isinstance(arg, Tensor) else arg for arg in args]
    func(x._local_tensor, *locals, **kwargs)
    if func is torch.ops.aten.copy_.default:
        # Below autograd nothing counts the change of the part, which a compiled graph may have saved for backward.
        torch.autograd.graph.increment_version(x._local_tensor)
    return x


@rule("aten::fill_.Tensor")
def fill(func: Any, x: Tensor, value: Tensor) -> Tensor:
    """Every element becomes the value."""
    if not isinstance(x, DTensor):
        return func(x, whole_beside(func, value))
    refuse_partial(func, x.placements, "its tensor")
    func(x._local_tensor, local_as(value, x.device_mesh, replicated(x.device_mesh)))
    return x


@rule("aten::triu", "aten::tril")
def triangle(func: Any, x: DTensor, diagonal: int = 0) -> DTensor:
    """Of the last two dims, laid out as x is."""
    mesh, placements = input_layout(func, x)
    if x.dim() < 2:
        raise RuntimeError(f"{func}: a tensor {tuple(x.shape)}; accepted: one of at least two dims")
    *_, (row, _), (column, _) = local_box(mesh, placements, x.shape)
    return wrap(func(x._local_tensor, diagonal + row - column), mesh, placements, x.shape)


@rule("aten::eye.out", "aten::eye.m_out")
def eye(func: Any, *extents: int, out: DTensor) -> DTensor:
    """The identity, written to a tensor that has its shape."""
    out.copy_(torch.eye(*extents, dtype=out.dtype, device=out.device))
    return out


@rule("aten::new_empty_strided")
def new_empty_strided(func: Any, x: Tensor, size: Sequence[int], stride: Sequence[int], **kwargs: Any) -> Any:
    """Laid out as x where it has its shape, as when autograd copies a gradient: DTensor of torch 2.11 would not."""
    if isinstance(x, DTensor) and tuple(size) == tuple(x.shape) and not has_partial(x.placements):
        for memory_format in (torch.contiguous_format, CHANNELS_LAST.get(x.dim(), torch.contiguous_format)):
            wanted = torch.empty(tuple(size), device="meta").to(memory_format=memory_format).stride()
            if tuple(stride) == wanted:
                local = torch.empty_like(x._local_tensor, memory_format=memory_format, **kwargs)
                return wrap(local, *layout_of(x), x.shape)
    return stock(func, (x, size, stride), kwargs)


@rule("aten::_conj", "aten::_neg_view")
def conjugate(func: Any, x: DTensor) -> DTensor:
    """The conjugate, or the negative, of every element, computed at once: a message contains memory as it is.

    In one process it is a view that conjugates when it is read.
    """
    local = func(x._local_tensor).resolve_conj().resolve_neg()

    def write(x: DTensor, y: DTensor) -> None:
        x._local_tensor.copy_(func(y._local_tensor))

    return copy_of(wrap(local, *layout_of(x), x.shape), x, write)


@rule("aten::view_as_real")
def pairs(func: Any, x: DTensor) -> DTensor:
    """(...) complex numbers as (..., 2) real ones."""
    return wrap(func(x._local_tensor), *layout_of(x), (*x.shape, 2))


@rule("aten::view_as_complex")
def complexes(func: Any, x: DTensor) -> DTensor:
    """(..., 2) real numbers as (...) complex ones."""
    mesh, placements = layout_of(x)
    if Shard(x.dim() - 1) in placements:
        return whole_or_refused(func, (x,), {}, "its last dim, the pairs, is sharded")
    return wrap(func(x._local_tensor), mesh, placements, x.shape[:-1])


@above_autograd("aten::to_mkldnn")
def to_mkldnn(x: DTensor, dtype: torch.dtype | None = None) -> Tensor:
    """An ordinary copy, in dtype, which convolutions take like any other."""
    return torch.ops.aten._to_copy(x, dtype=x.dtype if dtype is None else dtype)
