"""Rows normalized by their statistics: a function of this rank's plain tensors, its gradient, and that of the gradient.

Rows are dim 1 of (outer, rows, inner...). What a statistic goes over may lie in several rows, and on several ranks.
With n the normalized rows and g = weight dy: dx = (g - mean(g) - n mean(g n)) / sqrt(variance + eps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distconv.rules.normalization.combining import Share, of_all
from distconv.rules.normalization.moments import moments
from distconv.rules.operands.own_parts import apply
from distconv.rules.operands.sums import precise
from distconv.transfer.all_reduce import all_reduced
from distconv.transfer.tracing import is_traced

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Over:
    """What each statistic goes over."""

    share: Share | None
    """The ranks that share it; None where all of it is on this one."""
    total: int
    """Its elements, on all ranks."""
    statistics: int = 0
    """How many there are on this rank, where several rows have one in common."""
    index: Tensor | None = None
    """Then that of each row."""

    def summed(self, sums: Tensor, differentiably: bool = False) -> Tensor:
        """For each row, the sum over all rows and ranks that share its statistic, from this rank's sums (..., rows)."""
        if self.index is not None:
            sums = sums.new_zeros(*sums.shape[:-1], self.statistics).index_add(-1, self.index, sums)
        if self.share is not None:
            sums = apply(_Sum, sums, self.share) if differentiably else all_reduced(sums, self.share.group)
        return sums if self.index is None else sums[..., self.index]


class _Sum(torch.autograd.Function):
    """The sum of the tensors of all ranks of a share; each rank computes on with it by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return all_reduced(x.clone(), share.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return apply(_Sum, grad, ctx.share), None


def statistics(rows: Tensor, share: Share | None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each row, over the ranks that share it. Not differentiable."""
    found = moments(rows.detach())
    return found if share is None else of_all(*found, share)


def normalized(
    x: Tensor,
    shape: Sequence[int] | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    over: Over | None,
    eps: float,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, with one of each per row. Differentiable.

    Weight and bias may also be those of the first rows, which are repeated for the others.

    ``shape``: in which x is rows; None where it is. ``over``: what the statistics, those of the rows, go over; None for
    numbers that do not depend on the rows.
    """
    result: Tensor = apply(_Normalized, x, shape, weight, bias, mean, variance, over, eps)
    return result


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: Any, weight: Any, bias: Any, mean: Tensor, variance: Tensor, over: Any, eps: float
    ) -> Tensor:
        dtype = precise(x.dtype)
        mean, variance = _as(mean, dtype), _as(variance, dtype)
        ctx.save_for_backward(x, weight, mean, variance)  # the weight itself, so that backward sees changes of it
        ctx.shape, ctx.over, ctx.eps = shape, over, eps
        ctx.vectors = [v if v is None else v.shape for v in (weight, bias)]
        if not x.numel():
            return torch.empty_like(x)
        weight, bias = _repeated(weight, mean), _repeated(bias, mean)
        y = _scaled(x if shape is None else x.reshape(shape), mean, variance, weight, bias, eps)
        return y if shape is None else torch.ops.aten._unsafe_view(y, x.shape)  # autograd lets no view be changed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        shape, rows = ctx.shape, x
        if shape is not None:
            grad, rows = grad.reshape(shape), x.reshape(shape)
        need_x, _, *mask = ctx.needs_input_grad[:4]
        gradients = _differentiable_gradients if torch.is_grad_enabled() else normalized_backward
        found = gradients(grad, rows, _repeated(weight, mean), mean, variance, ctx.over, ctx.eps, need_x)
        dtype = mean.dtype if weight is None else weight.dtype
        vectors = (
            _as(_added_up(v, like), dtype) if wanted else None
            for v, like, wanted in zip(found[1:], ctx.vectors, mask, strict=True)
        )
        dx = found[0] if need_x else None
        return dx if shape is None or dx is None else dx.view(x.shape), None, *vectors, None, None, None, None


def normalized_backward(
    grad: Tensor,
    rows: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    over: Over | None,
    eps: float,
    need_input: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """dL/drows, and what this rank adds to dL/dweight and dL/dbias, one of each per row."""
    weight = None if weight is None else _as(weight, mean.dtype)
    if not rows.numel():
        dx, dweight, dbias = torch.empty_like(rows), torch.zeros_like(mean), torch.zeros_like(mean)
    else:
        grad, rows = _alike(grad, rows)
        # Of a graph, torch 2.13 says that the vectors have the type of rows, unless there is a weight.
        factor = torch.ones_like(mean) if weight is None and is_traced(rows) else weight
        dx, dweight, dbias = aten.native_batch_norm_backward(
            grad, rows, factor, mean, variance, None, None, False, eps, [need_input, True, True]
        )
    if not need_input or over is None:
        return dx, dweight, dbias
    sums = torch.cat([dbias, dweight]).view(2, -1)
    if weight is not None:
        sums = sums * weight
    sums = over.summed(sums)
    if rows.numel():
        scaled, scale = sums * torch.rsqrt(variance + eps), 1 / over.total
        if rows.dtype is torch.float16:  # which holds no large sums
            scaled, scale = scaled * scale, 1.0
        shift, slope = scaled.unbind()
        dx.sub_(_scaled(rows, mean, variance, slope, shift, eps), alpha=scale)
    return dx, dweight, dbias


def _scaled(
    rows: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    weight, bias = (v if v is None else _as(v, mean.dtype) for v in (weight, bias))
    return torch.native_batch_norm(rows, weight, bias, mean, variance, False, 0.0, eps)[0]


def _repeated(vector: Tensor | None, rows: Tensor) -> Tensor | None:
    """A vector with one number for each of the rows."""
    same = vector is None or vector.shape == rows.shape
    return vector if same else vector.repeat(len(rows) // len(vector))  # type: ignore[arg-type, union-attr]


def _added_up(vector: Tensor, shape: torch.Size) -> Tensor:
    """The adjoint of `_repeated`."""
    return vector if vector.shape == shape else vector.view(-1, *shape).sum(0)


def _as(vector: Tensor, dtype: torch.dtype) -> Tensor:
    """In this type; itself, without a call of torch's, where it has it."""
    return vector if vector.dtype is dtype else vector.to(dtype)


def _alike(grad: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Both lying in memory in the same way.

    Where an extent is 1, strides are ambiguous, and torch 2.13's `native_batch_norm_backward` on a CPU may take a
    contiguous and a channels-last tensor for alike, and read one of them in the order of the other.
    """
    if grad.stride() == rows.stride():
        return grad, rows
    return grad.contiguous(), rows.contiguous()


def _differentiable_gradients(
    grad: Tensor,
    rows: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    over: Over | None,
    eps: float,
    need_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, recorded by autograd."""
    dims, row = [0, *range(2, rows.dim())], (1, -1, *[1] * (rows.dim() - 2))
    g, wide = grad.to(mean.dtype), rows.to(mean.dtype)

    def mean_of(values: Tensor) -> Tensor:
        assert over is not None
        return (over.summed(values.sum(dims), differentiably=True) / over.total).view(row)

    centred = wide - (mean.view(row) if over is None else mean_of(wide))
    inverse = torch.rsqrt((variance.view(row) if over is None else mean_of(centred * centred)) + eps)
    normal = centred * inverse
    scaled = g if weight is None else g * weight.to(mean.dtype).view(row)
    dx = scaled if over is None else scaled - mean_of(scaled) - normal * mean_of(scaled * normal)
    return (dx * inverse).to(rows.dtype), (g * normal).sum(dims), g.sum(dims)
