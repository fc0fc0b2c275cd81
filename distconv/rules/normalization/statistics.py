"""Mean and variance of rows whose elements lie on several ranks, and what follows from them, forward and backward.

Those of all ranks are combined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
sample variances", 1979, equation 2.1.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distconv.dtensors import wrap
from distconv.layouts import box_at
from distconv.mesh import sharded_dims
from distconv.transfer.all_reduce import all_reduced
from distconv.transfer.gathering import all_gathered
from distconv.transfer.group import joint_group, joint_order
from distconv.transfer.tracing import constant, is_traced, planned

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Share:
    """Over which ranks statistics go, and how many elements each of them has of every column of a table of them."""

    group: dist.ProcessGroup | None
    counts: tuple[tuple[int, ...], ...]
    """By rank of the group, then by column: one column where all are alike."""
    total: int
    """Elements of a column, the same for all."""

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether every rank has as many elements of each column."""
        return len(set(self.counts)) == 1 and len(self.counts[0]) == 1


def split_axes(mesh: DeviceMesh, placements: Sequence[Placement], dims: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes of more than one rank that shard some of the dims."""
    return tuple(axis for axis, dim in sharded_dims(mesh, placements) if dim in dims and mesh.size(axis) > 1)


def boxes_along(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], axes: tuple[int, ...]
) -> list[tuple[tuple[int, int], ...]]:
    """What each member of the axes' group owns, in the group's order."""
    here = mesh.get_coordinate()
    assert here is not None
    places = list(itertools.product(*(range(mesh.size(axis)) for axis in axes)))
    order = joint_order(mesh, axes)[0]
    found = []
    for place in (places[at] for at in order):
        coordinate = list(here)
        for axis, at in zip(axes, place, strict=True):
            coordinate[axis] = at
        found.append(box_at(mesh, placements, shape, coordinate))
    return found


@planned(4096)
def share(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dims: tuple[int, ...]
) -> Share | None:
    """The share of statistics over ``dims`` of a tensor of global ``shape``; None where none of them is sharded."""
    axes = split_axes(mesh, placements, dims)
    if not axes:
        return None
    boxes = boxes_along(mesh, placements, shape, axes)
    counts = [math.prod(box[dim][1] - box[dim][0] for dim in dims) for box in boxes]
    return Share(joint_group(mesh, axes), tuple((count,) for count in counts), sum(counts))


def precise(tensor: Tensor) -> Tensor:
    """In a dtype in which sums are kept."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def count(rows: Tensor) -> int:
    """Elements of a row that this rank has."""
    return rows.shape[0] * math.prod(rows.shape[2:])


def moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each row of (outer, rows, inner...) on this rank; zeros where there is nothing."""
    if rows.numel():
        return _moments(precise(rows), [0, *range(2, rows.dim())])
    zeros = precise(rows.new_zeros(rows.shape[1]))
    return zeros, zeros


def _moments(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all dims but dim 1."""
    if is_traced(x):  # a compiler takes these into its loops, and calls the other one as it is
        variance, mean = torch.var_mean(x, dims, correction=0)
    else:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean, variance


def of_all(mean: Tensor, variance: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all ranks of the share, whose columns are all alike, from those of this rank.

    All are flat; bit by bit alike on all ranks.
    """
    rows = mean.numel()
    if not rows:
        return mean, variance
    ranks = len(share.counts)
    table = all_gathered(torch.cat([mean, variance]), ranks, share.group).view(ranks, 2 * rows)
    if share.is_even:
        # The mean of the means and variances, and the variance of the means: one operator has all three.
        means, spread = _moments(table, [0])
        mean, within = means.chunk(2)
        return mean, within + spread[:rows]
    weights, largest = _weights(share, mean.dtype, mean.device)
    weights = constant(weights, mean)
    means = table[:, :rows]
    pivot = means[largest]
    means = means - pivot
    shift = torch.mv(means.t(), weights)
    within = (means - shift).square_().add_(table[:, rows:])
    return pivot + shift, torch.mv(within.t(), weights)


@planned(1024)
def _weights(share: Share, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
    """The part of all elements that each rank has, and the rank with most, where all columns are alike."""
    counts = [count for (count,) in share.counts]
    return torch.tensor(counts, dtype=dtype, device=device) / share.total, counts.index(max(counts))


def combined(mean: Tensor, deviations: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    """The same from means and sums of squared deviations, (..., columns), which may lie on ranks differently."""
    if not mean.numel():
        return mean, deviations
    own, ranks = torch.stack([mean, deviations]), len(share.counts)
    means, squares = all_gathered(own.flatten(), ranks, share.group).view(ranks, *own.shape).unbind(1)
    weights = torch.tensor(share.counts, dtype=means.dtype, device=means.device) / share.total
    weights = weights.view(ranks, *[1] * (mean.dim() - 1), -1).expand_as(means)
    pivot = means.gather(0, weights.argmax(0, keepdim=True))[0]
    mean = pivot + (weights * (means - pivot)).sum(0)
    return mean, squares.sum(0) / share.total + (weights * (means - mean).square()).sum(0)


def normalize(
    rows: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 0.0
) -> Tensor:
    """(rows - mean) / sqrt(variance + eps) * weight + bias, with one of each per row."""
    if not rows.numel():
        return torch.empty_like(rows)
    dtype = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    weight, bias, *statistics = (
        v if v is None or v.dtype is dtype else v.to(dtype) for v in (weight, bias, mean, variance)
    )
    return torch.native_batch_norm(rows, weight, bias, statistics[0], statistics[1], False, 0.0, eps)[0]


@dataclass(frozen=True)
class Pool:
    """Which rows have their statistics in common: row r those of ``index[r]``, out of ``size``."""

    index: Tensor
    size: int


def alike(grad: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Both lying in memory in the same way.

    Where an extent is 1, strides are ambiguous, and torch 2.13's `native_batch_norm_backward` on a CPU may take a
    contiguous and a channels-last tensor for alike, and read one of them in the order of the other.
    """
    if grad.stride() == rows.stride():
        return grad, rows
    return grad.contiguous(), rows.contiguous()


def normalize_backward(
    grad: Tensor,
    rows: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    share: Share | None,
    total: int,
    pool: Pool | None,
    need_input: bool,
    eps: float = 0.0,
    inverse: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """dL/drows, and what this rank adds to dL/dweight and dL/dbias, one of each per row.

    ``inverse``: 1 / sqrt(variance + eps) where it is known. ``total``: of how many elements, on all ranks, each
    statistic is. With n the normalized rows and g = weight dy: dx = (g - mean(g) - n mean(g n)) / sqrt(variance + eps).
    """
    if not rows.numel():
        dx, dweight, dbias = torch.empty_like(rows), torch.zeros_like(mean), torch.zeros_like(mean)
    else:
        grad, rows = alike(grad, rows)
        dx, dweight, dbias = aten.native_batch_norm_backward(
            grad, rows, weight, mean, variance, None, None, False, eps, [need_input, True, True]
        )
    if not need_input:
        return None, dweight, dbias
    sums = torch.cat([dbias, dweight]).view(2, -1)
    if weight is not None:
        sums = sums * weight
    if pool is not None:
        sums = sums.new_zeros(2, pool.size).index_add_(1, pool.index, sums)
    if share is not None:
        sums = all_reduced(sums, share.group)
    if rows.numel():
        sums = sums if pool is None else sums[:, pool.index]
        if inverse is None:
            inverse = torch.rsqrt(variance + eps if eps else variance)
        scaled, scale = sums * inverse, 1 / total
        if rows.dtype is torch.float16:  # which holds no large sums
            scaled, scale = scaled * scale, 1.0
        shift, slope = scaled.unbind()
        dx.sub_(normalize(rows, mean, variance, slope, shift, eps), alpha=scale)
    return dx, dweight, dbias


def check_vector(func: Any, tensor: Tensor | None, name: str, channels: int) -> None:
    """RuntimeError unless it has one number per channel."""
    if tensor is not None and tuple(tensor.shape) != (channels,):
        raise RuntimeError(f"{func}: its {name} has shape {tuple(tensor.shape)}; accepted: ({channels},)")


def vector_layout(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """How one number per channel lies beside channels (dim 1) that lie as the placements say."""
    return tuple(Shard(0) if placement == Shard(1) else Replicate() for placement in placements)


def vector_gradient(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """How the gradient of one number per channel lies: a partial sum over samples and space."""
    return tuple(Shard(0) if p == Shard(1) else Partial() if isinstance(p, Shard) else Replicate() for p in placements)


def gradients(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    x: Tensor,
    dx: Tensor | None,
    dtype: torch.dtype,
    vectors: Sequence[Tensor | None],
) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """What a norm's backward returns, of dL/dx and one number per channel."""
    of = vector_gradient(placements)
    dweight, dbias = (None if v is None else wrap(v.to(dtype), mesh, of, x.shape[1:2]) for v in vectors)
    return None if dx is None else wrap(dx, mesh, placements, x.shape), dweight, dbias
