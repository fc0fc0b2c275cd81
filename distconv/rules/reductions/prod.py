"""The product of all elements, or along a dim, with the gradient that one process computes.

For a tensor without zeros one process divides the product by each element; for one with zeros it multiplies all others.
The two differ where an element is NaN: for this element the first gives NaN, the second a number. For subclasses of
tensors torch always does the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.operands.own_parts import apply
from distconv.rules.operands.sums import all_reduce
from distconv.rules.reductions import Reduction
from distconv.rules.reductions.along import CombinedDims, computed_along
from distconv.rules.registry import above_autograd, rule
from distconv.rules.whole import whole_or_refused
from distconv.transfer.collectives import PRODUCT

aten = torch.ops.aten

ALONG = CombinedDims(lambda arguments, _: [arguments["dim"]], reduces=True)


@rule("aten::prod", "aten::prod.dim_int")
def total_product(
    func: Any, x: DTensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> DTensor:
    """The product of the ranks' products."""
    work = Reduction(func, x, dim, keepdim)
    if x.is_complex() and work.axes:  # of these, no allreduce makes products
        if dim is None:
            return whole_or_refused(func, (x,), {"dtype": dtype}, "of complex numbers; accepted: .prod(dim)")
        return computed_along(func, (x, dim, keepdim), {"dtype": dtype}, ALONG)
    own = work.local.to(dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64))
    for each in work.dims:
        own = own.prod(each, keepdim=True)
    return work.wrap(all_reduce(own, work.mesh, work.axes, PRODUCT))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            y: Tensor = aten.prod.default(x) if dim is None else aten.prod.dim_int(x, dim, keepdim)
        ctx.dim, ctx.keepdim = dim, keepdim
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, y = ctx.saved_tensors
        if ctx.dim is not None and x.dim() and not ctx.keepdim:
            grad, y = grad.unsqueeze(ctx.dim), y.unsqueeze(ctx.dim)
        if not x.numel():
            return torch.zeros_like(x), None, None
        if not x.dim():
            return grad * y.conj(), None, None
        divided, zeros = grad * (y / x).conj(), x == 0
        if ctx.dim is not None:
            return torch.where(zeros.any(), grad * _of_others(x, ctx.dim).conj(), divided), None, None
        others = grad * _of_others(x.reshape(-1), 0).reshape(x.shape).conj()
        if not torch.is_grad_enabled():  # what would be zero times infinity is zero beside two zeros
            others = torch.where(zeros.sum() > 1, 0, others)
        return torch.where(zeros.any(), others, divided), None, None


def _of_others(x: Tensor, dim: int) -> Tensor:
    """The product of all elements along dim but each one itself."""
    one = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([one, x.narrow(dim, 0, x.shape[dim] - 1)], dim).cumprod(dim)
    behind = torch.cat([one, x.narrow(dim, 1, x.shape[dim] - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * behind


@above_autograd("aten::prod")
@above_autograd("aten::prod.dim_int")
def product_of_elements(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The product of all elements, or along a dim."""
    if dtype is None and not (x.is_floating_point() or x.is_complex()):
        dtype = torch.int64
    result: Tensor = apply(_Product, x if dtype is None else x.to(dtype), dim, keepdim)
    return result
