"""Operators that may compute their result in the memory into which their first operand is read again.

An operand and a result that are large together need not be on the device at once: while the operand is off the device,
its contents are read into the memory of the result, and the operator computes in place.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_NAMES = """\
add clamp clamp_max clamp_min div elu exp gelu hardsigmoid hardswish hardtanh leaky_relu masked_fill mul neg pow relu
rsqrt sigmoid silu sqrt sub tanh""".split()  # noqa: SIM905
"""Operators of which each element of the result depends on that element of the first operand, and on the others."""


@functools.lru_cache(maxsize=4096)
def in_place_form(func: Any) -> Any:
    """The operator that computes the same in its first operand; None if there is none."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return None
    name = func._schema.name.removeprefix("aten::")
    form = getattr(torch.ops.aten, name + "_", None) if name in _NAMES else None
    return getattr(form, func._schema.overload_name or "default", None)


def copied_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], least: int = 0) -> int:
    """The bytes of an operator's first operand if the operator may compute its result in a copy of it, and if these are
    at least ``least``; else 0. The operand has the result's shape, type and strides, and shares memory with no other.
    """
    if in_place_form(func) is None or not args:
        return 0
    x, others = args[0], [y for y in (*args[1:], *kwargs.values()) if isinstance(y, Tensor)]
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.is_contiguous() or x.storage_offset():
        return 0
    size, storage = x.numel() * x.element_size(), x.untyped_storage()
    if size < least or any(y.untyped_storage()._cdata == storage._cdata for y in others):
        return 0
    fits = all(y.dtype in (x.dtype, torch.bool) and y.dim() <= x.dim() for y in others)
    return size if fits and torch.broadcast_shapes(x.shape, *(y.shape for y in others)) == x.shape else 0
