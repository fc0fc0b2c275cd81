"""The strides of results on a processor, where torch's functions for tensors without numbers give others.

They decide in which memory format a convolution is computed, and so what its kernel copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Empty = Callable[[Sequence[int], Sequence[int], torch.dtype, torch.device], Tensor]
"""Makes a tensor without numbers, of a shape, strides, a type and a device."""


def corrected(func: Any, args: Sequence[Any], result: Any, empty: Empty) -> Any:
    """The result of an operator, its first tensor with the strides that torch gives it on a processor."""
    strides = _STRIDES.get(func)
    first = result[0] if isinstance(result, tuple) else result
    if strides is None or not isinstance(first, Tensor):
        return result
    expected = strides(*args)
    if expected is None or tuple(expected) == first.stride():
        return result
    made = empty(first.shape, expected, first.dtype, first.device)
    return (made, *result[1:]) if isinstance(result, tuple) else made


LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The memory formats channels_last by the number of dims."""


def _in_format(x: Tensor, *_: Any) -> Sequence[int]:
    """Of the result of a kernel that computes x in the memory format of its strides."""
    return _strides_in(x, is_channels_last(x))


def _strides_in(x: Tensor, channels_last: bool) -> Sequence[int]:
    form = LAST.get(x.dim(), torch.contiguous_format) if channels_last else torch.contiguous_format
    return torch.empty(x.shape, memory_format=form, device="meta").stride()


def is_channels_last(x: Tensor) -> bool:
    """Whether torch takes a tensor for one in the memory format channels_last, from its strides."""
    least = 0
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        stride = x.stride(dim)
        if x.shape[dim] == 0 or stride < max(least, dim == 1) or (dim == 0 and least == x.stride(1)):
            return False
        least = stride * max(x.shape[dim], 1)
    return True


def _in_dense_format(x: Tensor, *_: Any) -> Sequence[int]:
    """As `_in_format`, but the strides of dims of one element do not count."""
    if x.is_contiguous() or x.dim() not in LAST:
        return _strides_in(x, False)
    return _strides_in(x, is_channels_last(x) or x.is_contiguous(memory_format=LAST[x.dim()]))


def _in_dense_format_of_second(_: Any, x: Tensor, *__: Any) -> Sequence[int]:
    return _in_dense_format(x)


def _beside_number(x: Tensor, other: Any, *_: Any) -> Sequence[int] | None:
    """Of the result of a dense tensor and a number: in the order of those of x, also where one element makes this
    ambiguous; None for others."""
    if isinstance(other, Tensor) or 1 not in x.shape:
        return None
    strides, step = [0] * x.dim(), 1
    for dim in sorted(range(x.dim()), key=lambda dim: (x.stride(dim), x.shape[dim], -dim)):
        if x.stride(dim) != step and x.shape[dim] > 1:
            return None
        strides[dim] = step
        step *= x.shape[dim]
    return strides


_ATEN, _COMPARISONS = torch.ops.aten, ("eq", "ge", "gt", "le", "lt", "ne")
_STRIDES: Mapping[Any, Callable[..., Sequence[int] | None]] = {
    **dict.fromkeys((_ATEN.native_group_norm.default, _ATEN.roll.default), _in_format),
    _ATEN.native_batch_norm.default: _in_dense_format,
    _ATEN.native_batch_norm_backward.default: _in_dense_format_of_second,
    **{getattr(_ATEN, name).Tensor: _beside_number for name in (*_COMPARISONS, "add", "div", "mul", "sub")},
    **{getattr(_ATEN, name).Scalar: _beside_number for name in (*_COMPARISONS, "rsub")},
}
