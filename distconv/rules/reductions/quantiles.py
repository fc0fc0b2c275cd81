"""Quantiles of sharded tensors, from sorted elements. Torch writes its results in place, here to what may be a copy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distconv.rules.registry import above_autograd


@above_autograd("aten::quantile.scalar")
def quantile(
    x: Tensor, q: float, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Any:
    """The quantile along a dim; NaN where there is one, as in one process.

    One between two elements is interpolated linearly, by a weight that is rounded to the type of x.
    """
    if dim is None or not x.numel() or not 0 <= q <= 1:
        return NotImplemented
    if interpolation != "linear" or x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    extent, ordered = x.shape[dim], x.sort(dim).values
    rank = float(torch.tensor(q, dtype=x.dtype) * (extent - 1))
    low, high, last = (ordered.narrow(dim, at, 1) for at in (math.floor(rank), math.ceil(rank), extent - 1))
    found = torch.lerp(low, high, rank - math.floor(rank))
    found = torch.where(last.isnan(), last, found)
    return found if keepdim else found.squeeze(dim)
