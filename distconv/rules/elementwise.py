"""Operators on corresponding elements for which DTensor has no strategy, or a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.dtensors import local_as, wrap
from distconv.layouts import Layout, has_partial, layout, refuse_partial, replicated
from distconv.rules.losses import aligned, common_layout
from distconv.rules.plain_updates import whole_beside
from distconv.rules.registry import rule
from distconv.rules.stock import stock

OPERATORS = (
    *(f"{name}.Tensor" for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")),
    *(f"bitwise_{name}.Tensor" for name in ("and", "or", "xor")),
    *("maximum", "minimum", "where.self", "logical_and", "logical_or", "pow.Tensor_Tensor", "threshold_backward"),
    *("leaky_relu_backward", "elu_backward", "gelu_backward", "silu_backward", "mish_backward", "softplus_backward"),
    *("sigmoid_backward", "tanh_backward", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward"),
    *("log_sigmoid_backward", "_prelu_kernel_backward", "rrelu_with_noise_backward", "hardswish", "_prelu_kernel"),
    *("masked_fill.Scalar", "masked_fill.Tensor", "lerp.Scalar", "lerp.Tensor", "addcmul", "addcdiv"),
    *("atan2", "isclose", "mul.Scalar", "div.Scalar"),
    # For these torch 2.11's DTensor would gather such a dim of a tensor alone, too.
    *("leaky_relu", "elu", "celu", "hardsigmoid", "hardtanh", "threshold"),
    *("mish", "softplus", "softshrink", "hardshrink"),
    *("hardshrink_backward", "softshrink_backward", "logit_backward"),
)
"""Those that may meet a replicated tensor beside a sharded one: DTensor would gather a dim shorter than the axis."""


@rule(*(f"aten::{name}" for name in OPERATORS))
def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Local, on the layout of the sharded tensors."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    distributed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if any(has_partial(tensor.placements) for tensor in distributed):
        return stock(func, args, kwargs)
    mesh, placements = layout(distributed[0])
    shape = distributed[0].shape
    if len(distributed) == len(tensors) and all(
        other.placements == placements and other.shape == shape and other.device_mesh == mesh for other in distributed
    ):
        locals = [_plain(arg) for arg in args]
    else:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors if tensor.numel() or tensor.dim() > 1))
        mesh, placements = _sharding(tensors, shape)
        locals = [
            aligned(arg, mesh, placements, shape)
            if isinstance(arg, Tensor) and (arg.numel() or arg.dim() > 1)
            else _plain(arg)
            for arg in args
        ]
    result = _compact(func, locals, kwargs, shape) if _is_whole(placements) else func(*locals, **kwargs)
    if isinstance(result, tuple):
        return tuple(wrap(part, mesh, placements, shape) for part in result)
    return wrap(result, mesh, placements, shape)


def _is_whole(placements: Sequence[Placement]) -> bool:
    return all(placement.is_replicate() for placement in placements)


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


@rule(
    *(f"aten::{name}_.Tensor" for name in ("mul", "sub", "div")),
    *("aten::masked_fill_.Scalar", "aten::masked_fill_.Tensor", "aten::copy_", "aten::addcmul_", "aten::addcdiv_"),
    *(f"aten::{name}_" for name in ("leaky_relu", "elu", "celu", "silu", "mish", "threshold")),
    *("aten::lerp_.Scalar", "aten::lerp_.Tensor", "aten::hardsigmoid_", "aten::hardtanh_", "aten::hardswish_"),
    *("aten::clamp_min_", "aten::clamp_min_.Tensor", "aten::clamp_max_", "aten::clamp_max_.Tensor"),
)
def in_place(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Local, on the layout of x; a plain x gets what the whole tensors give."""
    if not isinstance(x, DTensor):
        func(x, *[whole_beside(func, arg) for arg in args], **kwargs)
        return x
    if any(has_partial(t.placements) for t in (x, *args) if isinstance(t, DTensor)):
        stock(func, (x, *args), kwargs)
        return x
    mesh, placements = layout(x)
    locals = [aligned(arg, mesh, placements, x.shape) if isinstance(arg, Tensor) else arg for arg in args]
    func(x._local_tensor, *locals, **kwargs)
    return x


def _sharding(tensors: Sequence[Tensor], shape: Sequence[int]) -> Layout:
    """How the result of tensors that broadcast to a shape lies: each mesh axis shards what it shards of one of them."""
    mesh, _ = common_layout(*tensors)
    result: list[Placement] = [Replicate()] * mesh.ndim
    for tensor in tensors:
        missing = len(shape) - tensor.dim()
        here = isinstance(tensor, DTensor) and tensor.device_mesh == mesh
        for axis, placement in enumerate(tensor.placements if here else ()):  # type: ignore[attr-defined]
            if isinstance(placement, Shard) and not isinstance(result[axis], Shard):
                result[axis] = Shard(placement.dim + missing)
    return mesh, tuple(result)


def _plain(arg: Any) -> Any:
    return arg._local_tensor if isinstance(arg, DTensor) else arg


@rule("aten::fill_.Tensor")
def fill(func: Any, x: DTensor, value: Tensor) -> DTensor:
    """Every element becomes the value."""
    refuse_partial(func, x.placements, "its tensor")
    func(x._local_tensor, local_as(value, x.device_mesh, replicated(x.device_mesh)))
    return x
