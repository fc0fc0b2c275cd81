"""The results of operators on tensors without data, and their kernels: torch is asked once for the same shapes.

The same operators recur in a step: in equal blocks, under partitions that divide a layer in the same way, before and
after its plans are made. Torch takes up to milliseconds to infer the shape of a result.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from distconv.performance.events import Kernel, KernelCall, Shape
from distconv.tensors.arguments import each_of

aten = torch.ops.aten

_known: dict[Any, tuple[Any, Kernel | None]] = {}  # Results, with a `Shape` in the place of each tensor, and kernels.


def made_without_data(func: Any, args: Any, kwargs: Any) -> tuple[Any, Kernel | None]:
    """The result of one of torch's operators, and what the rank computes for it; None for a view, or for nothing."""
    inputs = list(each_of(Tensor, (args, tuple(kwargs.values()))))
    if not _is_new(func) or not all(x.is_meta for x in inputs):
        result = _asked(func, args, kwargs)
        return result, _kernel(func, args, kwargs, inputs, result)
    # An operand that is given twice is read once.
    operands = [_key(x) for x in inputs]
    same = [operands.index(each) for each in operands]
    key = func, *same, _fixed(args), tuple(kwargs), _fixed(tuple(kwargs.values()))
    if key not in _known:
        result = _asked(func, args, kwargs)
        storages = {_storage(x) for x in inputs}
        outputs = each_of(Tensor, (result,))
        kernel = _kernel(func, args, kwargs, inputs, result)
        if any(not y.is_meta or _storage(y) in storages for y in outputs):
            return result, kernel
        _known[key] = tree_map(_shape, result), kernel
        return result, kernel
    shapes, kernel = _known[key]
    return _empty(shapes), kernel


def _fixed(value: Any) -> Any:
    """A value as a key: numbers with their types, as these decide the types of results."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_fixed, value)) if isinstance(value, tuple | list) else (type(value), value)


@functools.cache
def _is_new(func: Any) -> bool:
    """Whether an operator changes none of its operands and gives none of them back."""
    schema = func._schema
    return not schema.is_mutable and all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


def _asked(func: Any, args: Any, kwargs: Any) -> Any:
    return _statistics(*args) if func is aten.batch_norm_update_stats.default else func(*args, **kwargs)


def _statistics(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The shapes of aten.batch_norm_update_stats, which torch does not have for tensors without data."""
    channels = (x.shape[1],)
    return x.new_empty(channels), x.new_empty(channels)


def _kernel(func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> Kernel | None:
    outputs = list(each_of(Tensor, (result,)))
    if func.namespace not in ("aten", "distconv") or not outputs or func in _FREE:
        return None
    if torch.Tag.inplace_view in func.tags:
        return None  # as detach_, of which torch may refuse to be called again
    known = {_storage(x) for x in inputs}
    if not func._schema.is_mutable and all(_storage(y) in known for y in outputs):
        return None  # a view
    moved = {_key(tensor): tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs)}
    formula = flop_registry.get(func.overloadpacket)
    flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
    return Kernel(str(func), flops, sum(moved.values()), _call(func, args, kwargs))


_FREE = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default)


def _call(func: Any, args: Any, kwargs: Any) -> KernelCall:
    args, kwargs = tree_map(_shape, (tuple(args), dict(kwargs)))
    return KernelCall(func, args, tuple(sorted(kwargs.items())))


def _shape(leaf: Any) -> Any:
    return Shape(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _empty(shapes: Any) -> Any:
    if isinstance(shapes, Shape):
        return torch.empty_strided(shapes.sizes, shapes.strides, dtype=shapes.dtype, device="meta")
    return type(shapes)(map(_empty, shapes)) if isinstance(shapes, tuple | list) else shapes


def _key(tensor: Tensor) -> tuple[int, int, int]:
    return _storage(tensor), int(tensor.storage_offset()), tensor.numel()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
