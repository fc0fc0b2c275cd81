"""Mean and variance of rows of which this rank has all elements."""

from __future__ import annotations

import torch
from torch import Tensor

from distconv.rules.operands.sums import precise
from distconv.transfer.tracing import is_traced


def moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each row of (outer, rows, inner...) on this rank; zeros where there is nothing."""
    dtype = precise(rows.dtype)
    if not rows.numel():
        zeros = rows.new_zeros(rows.shape[1], dtype=dtype)
        return zeros, zeros
    if rows.dtype is not dtype:
        rows = rows.to(dtype)
    if type(rows) is Tensor or not is_traced(rows):
        return torch.batch_norm_update_stats(rows, None, None, 0.0)
    # A compiler takes these into its loops, and calls the other one as it is.
    variance, mean = torch.var_mean(rows, [0, *range(2, rows.dim())], correction=0)
    return mean, variance
