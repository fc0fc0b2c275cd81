"""Euclidean distances between many points by products of matrices, as torch computes ``cdist`` of more than 25."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.rules.products import product
from distconv.rules.registry import rule


@rule("aten::_euclidean_dist")
def euclidean(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """|a_i - b_j| of points a (..., n, k) and b (..., m, k): the root of |a|^2 - 2 a b + |b|^2, as torch's own formula.

    Its backward is made of operators that have rules.
    """
    a_squares, b_squares = a.square().sum(-1, True), b.square().sum(-1, True)
    first = torch.cat([a * -2, a_squares, torch.ones_like(a_squares)], -1)
    second = torch.cat([b, torch.ones_like(b_squares), b_squares], -1)
    return product(first, second.mT).clamp_min(0).sqrt()
