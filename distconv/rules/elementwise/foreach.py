"""Operators on lists of tensors, as optimizers and gradient clipping use them: each rank computes on its own shards.

A list may have tensors of several meshes, sharded and plain: parameters of layers under different partitions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from distconv.rules.operands.sums import all_reduce, extreme
from distconv.rules.registry import rule
from distconv.rules.whole import whole_beside
from distconv.tensors.dtensors import local_of, wrap
from distconv.tensors.layouts import has_partial, replicated
from distconv.tensors.mesh import sharded_dims
from distconv.tensors.refusal import refuse
from distconv.transfer.collectives import MAX
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import added

BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow")
UNARY = ("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "tanh", "zero")
TERNARY = ("addcdiv", "addcmul", "lerp")
FUSED = ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")


def _operators() -> list[str]:
    """All overloads of the elementwise operators, as this torch has them."""
    packets = [f"_foreach_{name}{ending}" for name in (*BINARY, *UNARY, *TERNARY) for ending in ("", "_")]
    found = []
    for packet in ("_foreach_copy_", *packets, *FUSED):
        if hasattr(torch.ops.aten, packet):
            overloads = (o for o in getattr(torch.ops.aten, packet).overloads() if not o.endswith("out"))
            found += [f"aten::{packet}" + (f".{overload}" if overload != "default" else "") for overload in overloads]
    return found


@rule(*_operators())
def foreach(func: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Local, each on the layout of its first tensor; numbers may be on any mesh."""
    layouts = [_layout(tensor) for tensor in tensors]
    first = [local_of(tensor) for tensor in tensors]
    rest = [_local(func, arg, layouts) for arg in args]
    named = {name: _local(func, arg, layouts) for name, arg in kwargs.items()}
    results = func(first, *rest, **named)
    if results is None or func._schema.name.endswith("_"):
        return results
    return [
        result if where is None else wrap(result, *where, tensor.shape)
        for result, where, tensor in zip(results, layouts, tensors, strict=True)
    ]


Where = tuple[DeviceMesh, tuple[Placement, ...]] | None


def _layout(tensor: Tensor) -> Where:
    """The layout of a tensor. A partial sum is added up in place, as an in-place operator changes that tensor."""
    if not isinstance(tensor, DTensor):
        return None
    if has_partial(tensor.placements):
        whole = added(tensor)
        tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec
    return tensor.device_mesh, tuple(tensor.placements)


def _local(func: Any, arg: Any, layouts: Sequence[Where]) -> Any:
    """An argument for the local call: a list beside that of the tensors, or one for all of them."""
    if isinstance(arg, DTensor):
        return _number(func, arg)
    if not isinstance(arg, list | tuple) or not any(isinstance(item, Tensor) for item in arg):
        return arg
    return [_beside(func, item, where) for item, where in zip(arg, layouts, strict=True)]


def _beside(func: Any, item: Tensor, where: Where) -> Tensor:
    if item.dim() == 0:
        return _number(func, item)
    if where is not None:
        return local_as(item, *where)
    if func._schema.is_mutable:
        return whole_beside(func, item)
    if isinstance(item, DTensor) and not all(placement.is_replicate() for placement in item.placements):
        raise refuse(func, "a plain tensor beside a sharded one: use distconv.gather on that first")
    return local_of(item)


def _number(func: Any, tensor: Tensor) -> Tensor:
    if tensor.dim():
        raise refuse(func, f"a tensor {tuple(tensor.shape)} for a whole list; accepted: a number")
    return added(tensor)._local_tensor if isinstance(tensor, DTensor) else tensor


@rule("aten::_foreach_norm.Scalar")
def norms(func: Any, tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """(sum of |x|^ord)^(1/ord) of each whole tensor; one allreduce for all that are sharded over the same axes."""
    largest, result = math.isinf(ord), list(tensors)
    if ord == 0 or ord == -math.inf:
        raise refuse(func, f"norm {ord} of sharded tensors; accepted: positive numbers and inf")
    together: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        where = _layout(tensor)
        axes = () if where is None else tuple(axis for axis, _ in sharded_dims(*where) if where[0].size(axis) > 1)
        together.setdefault((where and where[0], axes, tensor.dtype, tensor.device), []).append(index)
    for (mesh, axes, *_), members in together.items():
        own = []
        for index in members:
            tensor = tensors[index]
            sizes = local_of(tensor).to(dtype or tensor.dtype).abs()
            own.append((sizes.amax() if sizes.numel() else sizes.sum()) if largest else sizes.pow(ord).sum())
        found = torch.stack(own)
        if axes:
            found = extreme(found, mesh, axes, True) if largest else all_reduce(found, mesh, axes)
        for index, value in zip(members, (found if largest else found.pow(1 / ord)).unbind(), strict=True):
            result[index] = value.clone() if mesh is None else wrap(value.clone(), mesh, replicated(mesh), ())
    return result


@rule("aten::_amp_foreach_non_finite_check_and_unscale_")
def unscale(func: Any, gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Local, as GradScaler uses it; whether any gradient is not finite is agreed on all ranks, which step or do not.

    One allreduce for each mesh whose axes shard a gradient: torch's own looks at the layout of the first alone.
    """
    sharding: dict[DeviceMesh, set[int]] = {}
    for where in map(_layout, gradients):
        if where is not None:
            sharding.setdefault(where[0], set()).update(axis for axis, _ in sharded_dims(*where))
    found = local_of(found_inf)
    func([local_of(gradient) for gradient in gradients], found, local_of(inv_scale))
    for mesh, axes in sharding.items():
        found.copy_(all_reduce(found, mesh, sorted(axes), MAX))
