"""Weight norm: the gradient of w = v g / |v|, where v, g and dL/dw may each be sharded in their own way."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from distconv.rules.operands.sums import precise
from distconv.rules.registry import rule


@rule("aten::_weight_norm_interface_backward")
def weight_norm_backward(_: Any, grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """dL/dv = g / |v| (dL/dw - v sum(dL/dw v) / |v|²) and dL/dg = sum(dL/dw v) / |v|; sums over all dims but one."""
    others = [each for each in range(v.dim()) if each != dim]
    wide, norms = grad.to(precise(v.dtype)), norms.to(precise(v.dtype))
    products = wide * v
    slope = (products.sum(others, keepdim=True) if others else products) / norms  # of no dims torch sums over all
    return ((wide - v * (slope / norms)) * (g / norms)).to(v.dtype), slope.to(g.dtype)
