"""Cumulative sums and products along a dim, sharded or not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distconv.rules.registry import rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import dim_axes, input_layout
from distconv.transfer.exchange import exchange
from distconv.transfer.needs import window


@rule("aten::cumsum", "aten::cumprod")
def cumulative(func: Any, x: DTensor, dim: int, *, dtype: Any = None) -> DTensor:
    """The sum, or product, of all elements up to each one along dim, laid out as x is."""
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
        total, joined = (torch.sum, torch.add) if "sum" in func._schema.name else (torch.prod, torch.mul)
        before = exchange(mesh, axes, dim, owned, needs).fetch(total(local, dim, keepdim=True, dtype=dtype))
        result = joined(result, total(before, dim, keepdim=True, dtype=result.dtype))
    return wrap(result, mesh, placements, x.shape)
