"""Cumulative sums along a dim, sharded or not."""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.tensor import DTensor

from distconv.dtensors import wrap
from distconv.layouts import dim_axes, input_layout
from distconv.rules.registry import rule
from distconv.transfer.exchange import exchange
from distconv.transfer.needs import window


@rule("aten::cumsum")
def cumulative_sum(func: Any, x: DTensor, dim: int, *, dtype: Any = None) -> DTensor:
    """The sum of all elements up to each one along dim, laid out as x is."""
    mesh, placements = input_layout(func, x)
    dim = dim % x.dim() if x.dim() else 0
    local = x._local_tensor
    result = func(local, dim, dtype=dtype)
    axes = dim_axes(mesh, placements, dim)
    if axes:
        # The totals of the ranks are a dim of their own: each rank owns one element, and needs those before it.
        ranks = math.prod(mesh.size(axis) for axis in axes)
        owned = tuple((rank, rank + 1) for rank in range(ranks))
        needs = tuple(window((0, rank), ranks) for rank in range(ranks))
        before = exchange(mesh, axes, dim, owned, needs).fetch(local.sum(dim, keepdim=True, dtype=dtype))
        result += before.sum(dim, keepdim=True)
    return wrap(result, mesh, placements, x.shape)
