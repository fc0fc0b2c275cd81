"""Weight norm: w = v g / |v|, and its gradient, where v, g and dL/dw may each be sharded in their own way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.rules.operands.sums import precise
from distconv.rules.registry import rule


def _others(v: Tensor, dim: int) -> list[int]:
    return [each for each in range(v.dim()) if each != dim]


@rule("aten::_weight_norm_interface")
def weight_norm(_: Any, v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """w and |v|, over all dims but one; of a vector |v| has the magnitude of each element."""
    wide, others = v.to(precise(v.dtype)), _others(v, dim)  # of no dims torch takes the norm over all
    norms = torch.linalg.vector_norm(wide, 2, others, keepdim=True) if others else wide.abs()
    kept = torch.float32 if g.dtype == torch.bfloat16 else g.dtype
    return (wide * (g / norms)).to(v.dtype), norms.to(kept)


@rule("aten::_weight_norm_interface_backward")
def weight_norm_backward(_: Any, grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """dL/dv = g / |v| (dL/dw - v sum(dL/dw v) / |v|²) and dL/dg = sum(dL/dw v) / |v|; sums over all dims but one."""
    others = _others(v, dim)
    wide, norms = grad.to(precise(v.dtype)), norms.to(precise(v.dtype))
    products = wide * v
    slope = (products.sum(others, keepdim=True) if others else products) / norms  # of no dims torch sums over all
    return ((wide - v * (slope / norms)) * (g / norms)).to(v.dtype), slope.to(g.dtype)
