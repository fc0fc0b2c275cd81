"""Weight norm: w = v g / |v|, where v and g may each be sharded in their own way."""

from __future__ import annotations

import torch
from torch import Tensor

from distconv.rules.operands.sums import precise
from distconv.rules.registry import above_autograd


@above_autograd("aten::_weight_norm")
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """w, of norms over all dims but one; of a vector each element has its own. Autograd gives the gradients."""
    wide, others = v.to(precise(v.dtype)), [each for each in range(v.dim()) if each != dim]
    # Of no dims torch takes the norm over all.
    norms = torch.linalg.vector_norm(wide, 2, others, keepdim=True) if others else wide.abs()
    return (wide * (g / norms)).to(v.dtype)
