"""Finds the part of a tensor from which a part of its view is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Box = tuple[tuple[int, int], ...]  # An interval of each dim.


def aligned_box(box: Box, shape: Sequence[int]) -> Box:
    """The part of an operand that broadcasts to a part of the result."""
    inner = box[len(box) - len(shape) :]
    return tuple((0, 1) if n == 1 else interval for n, interval in zip(shape, inner, strict=True))


Sourced = tuple[Any, Box, Callable[[Tensor], Tensor]]
"""For a part of a view: of what it is one, the part of that, and how the view is made of it."""


def _same(box: Box, x: Any) -> Sourced:
    return x, box, lambda y: y


def _unsqueezed(box: Box, x: Any, dim: int) -> Sourced:
    dim %= x.dim() + 1
    start, stop = box[dim]
    return x, (*box[:dim], *box[dim + 1 :]), lambda y: y.unsqueeze(dim).narrow(dim, start, stop - start)


def _expanded(box: Box, x: Any, size: Sequence[int], **_: Any) -> Sourced:
    return x, aligned_box(box, x.shape), lambda y: y.expand([stop - start for start, stop in box])


def _sliced(
    box: Box, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Sourced | None:
    dim %= x.dim()
    first, _, step = slice(start, end, step).indices(x.shape[dim])
    if step != 1:
        return None
    return x, (*box[:dim], (box[dim][0] + first, box[dim][1] + first), *box[dim + 1 :]), lambda y: y


def _selected(box: Box, x: Any, dim: int, index: int) -> Sourced:
    dim, index = dim % x.dim(), index % x.shape[dim]
    return x, (*box[:dim], (index, index + 1), *box[dim:]), lambda y: y.select(dim, 0)


def _permuted(box: Box, x: Any, dims: Sequence[int]) -> Sourced:
    order = [dim % x.dim() for dim in dims]
    return x, tuple(box[order.index(dim)] for dim in range(x.dim())), lambda y: y.permute(order)


def _transposed(box: Box, x: Any, first: int, second: int) -> Sourced:
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    return _permuted(box, x, order)


def _viewed(box: Box, x: Any, size: Sequence[int]) -> Sourced | None:
    """The part that a view reads if its last dims are those of x; the other dims are read whole."""
    count = math.prod(x.shape)
    if not count:
        return None
    shape = [-count // math.prod(size) if n == -1 else n for n in size]
    last = 0
    while last < min(x.dim(), len(shape)) and x.shape[-1 - last] == shape[-1 - last]:
        last += 1
    if not last:
        return None
    front, back = len(shape) - last, box[len(shape) - last :]
    source = (*((0, n) for n in x.shape[: x.dim() - last]), *back)

    def again(y: Tensor) -> Tensor:
        y = y.reshape(*shape[:front], *y.shape[y.dim() - last :])
        return y[tuple(slice(*interval) for interval in box[:front])]

    return x, source, again


SOURCES: dict[Any, Callable[..., Sourced | None]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.unsqueeze.default: _unsqueezed,
    aten.expand.default: _expanded,
    aten.slice.Tensor: _sliced,
    aten.select.int: _selected,
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.view.default: _viewed,
    torch.ops.aten._unsafe_view.default: _viewed,
}
"""The functions that find a part, by the operator that makes the view."""
