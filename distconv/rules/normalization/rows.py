"""Rows normalized by their statistics: a function of this rank's plain tensors, its gradient, and that of the gradient.

Rows are dim 1 of (outer, rows, inner...). A statistic may go over several rows, and over several ranks.
With n the normalized rows and g = weight dy: dx = (g - mean(g) - n mean(g n)) / sqrt(variance + eps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distconv.rules.normalization.shares import StatisticsShare, moments, of_all
from distconv.rules.operands.own_parts import Takes, apply, taken
from distconv.rules.operands.sums import precise
from distconv.transfer.collectives import all_reduced
from distconv.transfer.tracing import constant, is_traced, planned

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Over:
    """The elements of which each statistic is computed."""

    share: StatisticsShare | None  # The ranks that share it; None where all of it is on this one.
    total: int  # The number of elements of a statistic, on all ranks.
    statistics: int = 0  # How many statistics there are on this rank, if several rows share one.
    index: Tensor | None = None  # The number of each row's statistic then.

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
    def forward(ctx: Any, x: Tensor, share: StatisticsShare) -> Tensor:
        ctx.share = share
        return all_reduced(x.clone(), share.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return apply(_Sum, grad, ctx.share), None


def statistics(rows: Tensor, share: StatisticsShare | None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each row, over the ranks that share it. Not differentiable."""
    found = moments(rows.detach())
    return found if share is None else of_all(*found, share)


@dataclass(slots=True, eq=False)  # a frozen one takes three times as long to make, for every call
class Rows:
    """How a tensor is normalized as rows, with one mean, variance, weight and bias per row."""

    eps: float
    over: Over | None  # What the rows' statistics go over; None for numbers that do not depend on the rows.
    shape: Sequence[int] | None = None  # In which the tensor is rows; None where it is.
    repeat: tuple[int, int] | None = None
    """(times, n) where weight and bias are those of the first n rows, and are repeated for the others."""
    takes: Takes = (None, None)
    """What the gradients of weight and bias are given to, if anything; its results are passed on in their place."""


def normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, how: Rows
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias. Differentiable."""
    return apply(_Normalized, x, weight, bias, mean, variance, how)


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, how: Rows) -> Tensor:
        dtype = precise(x.dtype)
        if mean.dtype is not dtype or variance.dtype is not dtype:
            mean, variance = mean.to(dtype), variance.to(dtype)
        # The weight itself, so that backward sees changes of it. A checkpoint may compute other statistics again.
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.how = how
        if not x.numel():
            return torch.empty_like(x)
        if how.repeat is not None:
            weight, bias = _repeated(weight, how.repeat), _repeated(bias, how.repeat)
        y = _scaled(x if how.shape is None else x.reshape(how.shape), mean, variance, weight, bias, how.eps)
        return y if how.shape is None else torch.ops.aten._unsafe_view(y, x.shape)  # autograd lets no view be changed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how: Rows = ctx.how
        shape, repeat, takes = how.shape, how.repeat, how.takes
        x, weight, mean, variance = ctx.saved_tensors
        rows = x
        if shape is not None:
            grad, rows = grad.reshape(shape), x.reshape(shape)
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() and takes[0] is not None:
            weight = takes[0].arriving(weight)
        gradients = _differentiable_gradients if torch.is_grad_enabled() else normalized_backward
        repeated = weight if repeat is None else _repeated(weight, repeat)
        dx, dweight, dbias = gradients(grad, rows, repeated, mean, variance, how, need_x)
        if repeat is not None:
            dweight, dbias = _added_up(dweight, repeat), _added_up(dbias, repeat)
        dtype = mean.dtype if weight is None else weight.dtype
        dx = None if dx is None or not need_x else dx if shape is None else dx.view(x.shape)
        vectors = _as(dweight, dtype) if need_weight else None, _as(dbias, dtype) if need_bias else None
        return dx, *map(taken, vectors, takes), None, None, None


def normalized_backward(
    grad: Tensor, rows: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, how: Rows, need_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """dL/drows, and what this rank adds to dL/dweight and dL/dbias, one of each per row."""
    over, eps = how.over, how.eps
    weight = _as(weight, mean.dtype)
    if not rows.numel():
        dx, dweight, dbias = torch.empty_like(rows), torch.zeros_like(mean), torch.zeros_like(mean)
    else:
        # Where an extent is 1, strides are ambiguous, and torch 2.13's kernel on a CPU may take a contiguous and a
        # channels-last tensor for the same, and read one of them in the order of the other.
        if grad.stride() != rows.stride():
            grad, rows = grad.contiguous(), rows.contiguous()
        # In a graph, torch 2.13 infers the dtype of rows for the vectors, unless there is a weight.
        factor = torch.ones_like(mean) if weight is None and is_traced(rows) else weight
        dx, dweight, dbias = aten.native_batch_norm_backward(
            grad, rows, factor, mean, variance, None, None, False, eps, [need_input, True, True]
        )
    if not need_input or over is None:
        return dx, dweight, dbias
    sums = torch.stack([dbias, dweight])
    if weight is not None and over.index is not None:  # rows that share a statistic have weights of their own
        sums, weight = sums * weight, None
    sums = over.summed(sums)
    if rows.numel():
        # Times weight / sqrt(variance + eps), by one operator.
        zeros = constant(_zeros(sums.shape[1], sums.dtype, sums.device), sums)
        scaled, scale = _scaled(sums, zeros, variance, weight, None, eps), 1 / over.total
        if rows.dtype is torch.float16:  # in which large sums overflow
            scaled, scale = scaled * scale, 1.0
        shift, slope = scaled.unbind()
        dx.sub_(_scaled(rows, mean, variance, slope, shift, eps), alpha=scale)
    return dx, dweight, dbias


@planned(1024)
def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


def _scaled(
    rows: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    weight, bias = _as(weight, mean.dtype), _as(bias, mean.dtype)
    return torch.native_batch_norm(rows, weight, bias, mean, variance, False, 0.0, eps)[0]


def _repeated(vector: Tensor | None, repeat: tuple[int, int]) -> Tensor | None:
    """A vector with one number for each of the rows."""
    return vector if vector is None else vector.repeat(repeat[0])


def _added_up(vector: Tensor, repeat: tuple[int, int]) -> Tensor:
    """The adjoint of `_repeated`."""
    return vector.view(repeat).sum(0)


def _as(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """In this type; itself, without a call of torch's, where it has it."""
    return vector if vector is None or vector.dtype is dtype else vector.to(dtype)


def _differentiable_gradients(
    grad: Tensor, rows: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, how: Rows, need_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, recorded by autograd."""
    over = how.over
    dims, row = [0, *range(2, rows.dim())], (1, -1, *[1] * (rows.dim() - 2))
    g, wide = grad.to(mean.dtype), rows.to(mean.dtype)

    def mean_of(values: Tensor) -> Tensor:
        assert over is not None
        return (over.summed(values.sum(dims), differentiably=True) / over.total).view(row)

    centred = wide - (mean.view(row) if over is None else mean_of(wide))
    inverse = torch.rsqrt((variance.view(row) if over is None else mean_of(centred * centred)) + how.eps)
    normal = centred * inverse
    scaled = g if weight is None else g * weight.to(mean.dtype).view(row)
    dx = scaled if over is None else scaled - mean_of(scaled) - normal * mean_of(scaled * normal)
    return (dx * inverse).to(rows.dtype), (g * normal).sum(dims), g.sum(dims)
