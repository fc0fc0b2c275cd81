"""Mean and variance of rows of which this rank has all elements."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distconv.transfer.tracing import is_traced


def precise(tensor: Tensor) -> Tensor:
    """In a dtype in which sums are kept."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def count(rows: Tensor) -> int:
    """Elements of a row that this rank has."""
    return rows.shape[0] * math.prod(rows.shape[2:])


def moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each row of (outer, rows, inner...) on this rank; zeros where there is nothing."""
    if rows.numel():
        return mean_and_variance(precise(rows), [0, *range(2, rows.dim())])
    zeros = precise(rows.new_zeros(rows.shape[1]))
    return zeros, zeros


def mean_and_variance(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all dims but dim 1."""
    if is_traced(x):  # a compiler takes these into its loops, and calls the other one as it is
        variance, mean = torch.var_mean(x, dims, correction=0)
    else:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean, variance
