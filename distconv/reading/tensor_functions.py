"""Torch functions for lazy tensors. Importing this module registers them."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import numpy
import torch

from distconv.reading.array import LazyArray
from distconv.reading.expression import Converted, Joined
from distconv.reading.fault import note
from distconv.reading.source import shown
from distconv.reading.statistic import asked
from distconv.reading.tensor import HANDLERS, Function, LazyTensor, cast_tensor, computed_lazily, is_lazy_tensor, meta
from distconv.reading.view import plain_index


def _elementwise(name: str, *args: Any, **options: Any) -> Any:
    expression = computed_lazily(name, args, options)
    return NotImplemented if expression is None else LazyTensor(expression)


def _in_place(name: str, *args: Any, **options: Any) -> Any:
    first = args[0]
    if first.memory.is_shared(first):
        return NotImplemented
    expression = computed_lazily(f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_"), args, options)
    if expression is None or expression.shape != first.expression.shape:
        return NotImplemented
    if expression.dtype != first.dtype:
        if not torch.can_cast(expression.dtype, first.dtype):
            return NotImplemented  # torch's own error
        expression = cast_tensor(expression, first.dtype)
    first.look(expression)  # the memory, which nobody else sees, has another content
    return first


CASTS = {
    **{name: getattr(torch, name) for name in ("float", "double", "half", "bfloat16", "int", "long", "short", "bool")},
    "byte": torch.uint8,
    "char": torch.int8,
}


def _to(name: str, x: LazyTensor, *args: Any, **options: Any) -> Any:
    if name in CASTS:
        if args or options:
            return NotImplemented
        dtype: Any = CASTS[name]
    elif name == "type":
        if len(args) != 1 or not isinstance(args[0], torch.dtype):
            return NotImplemented
        dtype = args[0]
    else:
        device, dtype, _, format = torch._C._nn._parse_to(*args, **{k: v for k, v in options.items() if k != "copy"})
        if (device is not None and device.type != "cpu") or format is not None:
            return NotImplemented
        dtype = dtype or x.dtype
    if dtype == x.dtype:
        return LazyTensor(x.expression) if options.get("copy") or True in args[1:] else x
    return LazyTensor(cast_tensor(x.expression, dtype))


def _copied(name: str, x: LazyTensor, *args: Any, **options: Any) -> Any:
    return NotImplemented if args or options else LazyTensor(x.expression)


def _contiguous(name: str, x: LazyTensor, *args: Any, **options: Any) -> Any:
    if args or options:
        return NotImplemented
    return x if x.fake().is_contiguous() else LazyTensor(x.expression)


def _statistic(name: str, x: LazyTensor, *args: Any, **options: Any) -> Any:
    if name in ("max", "min", "median", "nanmedian") and (args or options):
        return NotImplemented  # of two results, or of two tensors
    fake = x.fake()
    made = asked(x.expression, None if fake.is_contiguous() else fake.stride(), name, args, options)
    return NotImplemented if made is NotImplemented else LazyTensor(made)


def _getitem(name: str, x: LazyTensor, key: Any) -> Any:
    keys = plain_index(key)
    if keys is None or any(isinstance(each, slice) and (each.step or 1) < 0 for each in keys):
        return NotImplemented
    return x.view_as_lazy(operator.itemgetter(keys))


def _view(name: str, x: LazyTensor, *args: Any, **options: Any) -> Any:
    return x.view_as_lazy(lambda tensor: getattr(tensor, name)(*args, **options))


def _flip(name: str, x: LazyTensor, *dims: Any, **options: Any) -> Any:
    given = options.get("dims", dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)
    array = LazyArray(x.expression).view_as_lazy(lambda array: numpy.flip(array, given))
    return LazyTensor(array.expression)  # torch copies here


def _joined(name: str, tensors: Any, dim: Any = 0, **options: Any) -> Any:
    items = list(tensors)
    if options.pop("out", None) is not None or options or not all(map(is_lazy_tensor, items)):
        return NotImplemented
    stacked = name == "stack"
    dtypes = {item.dtype for item in items}
    metas = [meta(item.expression) for item in items]
    try:
        tried = (torch.stack if stacked else torch.cat)(metas, dim)
    except RuntimeError as error:
        usual = Counter(item.shape for item in items).most_common(1)[0][0]
        odd = next((place for place, item in enumerate(items) if item.shape != usual), 0)
        for source in items[odd].expression.sources():
            note(error, shown(source.path), source.key, odd)
        if stacked and items[odd].shape != usual:  # torch says it so of tensors with elements
            error.args = (
                f"stack expects each tensor to be equal size, but got {[*usual]} and, here, {[*items[odd].shape]}",
            )
        raise
    if len(dtypes) > 1 or any(item.dim() == 1 and not item.numel() for item in items):
        return NotImplemented
    return LazyTensor(Joined([item.expression for item in items], range(tried.dim())[dim], stacked=stacked))


def _numpy(name: str, x: LazyTensor, **options: Any) -> Any:
    if options:
        return NotImplemented
    return LazyArray(Converted(x.expression), x.memory, (*x.steps, Function("numpy")))


def _itself(name: str, x: LazyTensor, *args: Any, **options: Any) -> Any:
    return NotImplemented if args or options else LazyTensor(x.expression, x.memory, x.steps)


BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
ELEMENTWISE = (
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "remainder", "pow"),
    *(f"__{name}__" for name in (*BINARY, "div", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "and", "or")),
    *(f"__r{name}__" for name in (*BINARY, "div")),
    *("rsub", "neg", "negative", "abs", "absolute", "exp", "log", "log1p", "log2", "log10", "expm1", "sqrt", "rsqrt"),
    *("square", "reciprocal", "sigmoid", "tanh", "relu", "clamp", "clip", "clamp_min", "clamp_max", "sign", "floor"),
    *("ceil", "round", "trunc", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite", "isinf", "nan_to_num"),
    *("logical_not", "logical_and", "logical_or", "bitwise_not", "__invert__", "maximum", "minimum"),
)
IN_PLACE = ("add_", "sub_", "subtract_", "mul_", "multiply_", "div_", "divide_", "true_divide_", "clamp_", "clip_")

STATISTICS = (
    *("mean", "std", "var", "sum", "prod", "amin", "amax", "min", "max", "median", "quantile"),
    *("nanmean", "nansum", "nanmedian", "nanquantile", "any", "all", "count_nonzero"),
)

HANDLERS |= {
    **dict.fromkeys(STATISTICS, _statistic),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys((*IN_PLACE, "__iadd__", "__isub__", "__imul__", "__itruediv__"), _in_place),
    **dict.fromkeys((*CASTS, "to", "type"), _to),
    **dict.fromkeys(("clone", "__deepcopy__"), _copied),
    **dict.fromkeys(("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis"), _view),
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "select", "narrow"), _view),
    **dict.fromkeys(("stack", "cat", "concat", "concatenate"), _joined),
    **dict.fromkeys(("detach", "cpu"), _itself),
    "contiguous": _contiguous,
    "__getitem__": _getitem,
    "flip": _flip,
    "numpy": _numpy,
}
