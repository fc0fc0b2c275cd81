"""Mean and variance of rows of which this rank has all elements."""

from __future__ import annotations

import torch
from torch import Tensor

from distconv.rules.operands.sums import precise
from distconv.transfer.tracing import is_traced


def moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each row of (outer, rows, inner...) on this rank; zeros where there is nothing."""
    if rows.numel():
        dtype = precise(rows.dtype)
        return mean_and_variance(rows if rows.dtype is dtype else rows.to(dtype), [0, *range(2, rows.dim())])
    zeros = rows.new_zeros(rows.shape[1], dtype=precise(rows.dtype))
    return zeros, zeros


def mean_and_variance(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all dims but dim 1."""
    if is_traced(x):  # a compiler takes these into its loops, and calls the other one as it is
        variance, mean = torch.var_mean(x, dims, correction=0)
    else:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean, variance
