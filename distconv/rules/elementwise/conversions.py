"""Conversions to another form of the same numbers: conjugates, pairs of real numbers, and memory as oneDNN lays it out.

In one process a conjugate is a view that conjugates when it is read. A message contains memory as it is, so conjugates
of shards are computed at once. Of a sharded tensor, oneDNN's layout is an ordinary copy, which convolutions take like
any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.registry import rule
from distconv.rules.whole import whole_or_refused
from distconv.rules.whole.copies import copy_of
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import dim_axes, layout_of


@rule("aten::_conj", "aten::_neg_view")
def conjugate(func: Any, x: DTensor) -> DTensor:
    """The conjugate, or the negative, of every element."""
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
    if dim_axes(mesh, placements, x.dim() - 1):
        return whole_or_refused(func, (x,), {}, "its last dim, the pairs, is sharded")
    return wrap(func(x._local_tensor), mesh, placements, x.shape[:-1])


@rule("aten::to_mkldnn")
def to_mkldnn(_: Any, x: DTensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy, in dtype."""
    return torch.ops.aten._to_copy(x, dtype=x.dtype if dtype is None else dtype)


@rule("aten::to_mkldnn_backward")
def to_mkldnn_backward(_: Any, grad: DTensor, x: DTensor) -> Tensor:
    """The gradient of what was copied."""
    return grad.to(x.dtype)
