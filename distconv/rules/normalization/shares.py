"""Statistics of a tensor that several ranks share: which ranks these are, and how the means and variances of their
elements combine; and vectors with one number per channel.

Few ranks gather what all have found, and combine it as in Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances", 1979, equation 2.1. Many ranks sum it instead: libraries gather along a ring,
which takes one latency per rank, and sum along trees, which takes one for every doubling of the ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from distconv.rules.operands.own_parts import as_own_part
from distconv.rules.operands.sums import precise
from distconv.tensors.layouts import boxes_along, owners
from distconv.tensors.mesh import sharded_dims
from distconv.transfer.collectives import all_gathered, all_reduced
from distconv.transfer.group import joint_group, joint_order
from distconv.transfer.tracing import constant, is_traced, planned


def split_axes(mesh: DeviceMesh, placements: Sequence[Placement], dims: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes of more than one rank that shard some of the dims."""
    return tuple(axis for axis, dim in sharded_dims(mesh, placements) if dim in dims and mesh.size(axis) > 1)


def boxes_of_members(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], axes: tuple[int, ...]
) -> list[tuple[tuple[int, int], ...]]:
    """The box of each member of the axes' group, in the group's order."""
    boxes = boxes_along(mesh, placements, shape, axes)
    return [boxes[at] for at in joint_order(mesh, axes)[0]]


@planned(4096)
def statistics_share(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dims: tuple[int, ...]
) -> StatisticsShare | None:
    """The share of statistics over ``dims`` of a tensor of global ``shape``; None where none of them is sharded."""
    axes = split_axes(mesh, placements, dims)
    if not axes:
        return None
    boxes = boxes_of_members(mesh, placements, shape, axes)
    counts = [math.prod(box[dim][1] - box[dim][0] for dim in dims) for box in boxes]
    here = joint_order(mesh, axes)[1]
    return StatisticsShare(joint_group(mesh, axes), here, tuple((count,) for count in counts), sum(counts))


def check_vectors(func: Any, channels: int, **vectors: Tensor | None) -> None:
    """RuntimeError unless each has one number per channel."""
    for name, vector in vectors.items():
        if vector is not None and tuple(vector.shape) != (channels,):
            label = name.replace("_", " ")
            raise RuntimeError(f"{func}: its {label} has shape {tuple(vector.shape)}; accepted: ({channels},)")


def vector_layout(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The layout of one number per channel beside channels (dim 1) with these placements."""
    return tuple(Shard(0) if placement == Shard(1) else Replicate() for placement in placements)


def vectors_here(mesh: DeviceMesh, placements: Sequence[Placement], *vectors: Tensor | None) -> list[Tensor | None]:
    """This rank's part of vectors with one number per channel, whose gradients are added over samples and space."""
    summed = [axis for axis, dim in sharded_dims(mesh, placements) if dim != 1]
    layout = vector_layout(placements)
    return [None if vector is None else as_own_part(vector, mesh, layout, summed) for vector in vectors]


class _Gathered(NamedTuple):
    """The gathering of vectors, sharded over some axes, to every rank in one exchange."""

    group: dist.ProcessGroup | None
    ranks: int
    padding: int  # Elements behind what this rank has, so that all ranks send as many.
    places: Tensor  # For each element of the whole vectors in order, its position in the data that all ranks sent.


def gathered(mesh: DeviceMesh, axes: tuple[int, ...], values: list[Tensor], channels: tuple[int, ...]) -> list[Tensor]:
    """Whole vectors from this rank's shards of them. Collective."""
    plan = _plan(mesh, axes, channels, values[0].device)
    own = torch.cat([*values, values[0].new_zeros(plan.padding)] if plan.padding else values)
    whole = all_gathered(own, plan.ranks, plan.group).index_select(0, constant(plan.places, own))
    return list(whole.split(channels))


@planned(1024)
def _plan(mesh: DeviceMesh, axes: tuple[int, ...], channels: tuple[int, ...], device: torch.device) -> _Gathered:
    order, here = joint_order(mesh, axes)
    owned = [[(stop - start) for start, stop in owners(mesh, axes, extent)] for extent in channels]
    each = [sum(own[at] for own in owned) for at in range(len(order))]
    longest = max(each)
    index: list[int] = []
    starts = {at: member * longest for member, at in enumerate(order)}
    for own in owned:
        for at, extent in enumerate(own):
            index += range(starts[at], starts[at] + extent)
            starts[at] += extent
    padding = longest - each[order[here]]
    return _Gathered(joint_group(mesh, axes), len(order), padding, torch.tensor(index, device=device))


FEW = 8
"""Ranks that gather. A ring takes p - 1 latencies, two trees 2 log2 p (Thakur, Rabenseifner and Gropp 2005): 7 and 6
for 8 ranks, 15 and 8 for 16."""


@dataclass(frozen=True, eq=False)
class StatisticsShare:
    """Over which ranks statistics go, and how many elements each of them has of every column of a table of them."""

    group: dist.ProcessGroup | None
    here: int  # This rank's place in the group.
    counts: tuple[tuple[int, ...], ...]  # By rank of the group, then by column: one column if all are equal.
    total: int  # Elements of a column, the same for all.

    @functools.cached_property
    def even(self) -> int:
        """The number of first ranks that have as many elements of each column, where the others have none; else 0."""
        counts = [sum(each) for each in self.counts]
        first = len(counts) - counts.count(0) or len(counts)
        return first if len(self.counts[0]) == len({*counts[:first]}) == 1 and not any(counts[first:]) else 0

    def is_summed(self, dtype: torch.dtype) -> bool:
        """Whether statistics of this dtype are summed. Those in float64 are gathered: nothing wider could sum them."""
        return len(self.counts) > FEW and dtype is not torch.float64


def of_all(mean: Tensor, variance: Tensor, share: StatisticsShare) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all ranks of the share, from those of this rank: flat, or (..., its columns).

    Bit by bit the same on all ranks. Collective over the share's group.
    """
    rows, ranks, columns = mean.numel(), len(share.counts), len(share.counts[0])
    if not rows:
        return mean, variance
    if share.is_summed(mean.dtype):
        weight = constant(_weights(share, torch.float64, mean.device)[0], mean)[share.here, 0]
        return _summed(mean, weight, variance.double() * weight, share)
    vectors = (mean, variance) if mean.dim() == 1 else (mean.flatten(), variance.flatten())
    own = torch.cat(vectors)
    table = all_gathered(own, ranks, share.group).view(ranks, 2 * rows)
    if share.even:
        # The mean of the means and variances, and the variance of the means: one operator has all three.
        means, spread = moments(table if share.even == ranks else table[: share.even])
        mean, within = torch.split_with_sizes(means, [rows, rows])
        return mean, within + spread[:rows]
    weights, largest = (constant(each, mean) for each in _weights(share, mean.dtype, mean.device))
    means, variances = table.view(ranks, 2, -1, columns).unbind(1)
    pivot = means.gather(0, largest.expand(1, *means.shape[1:]))
    means = means - pivot
    shift = (weights * means).sum(0)
    within = (weights * (variances + (means - shift).square())).sum(0)
    return (pivot[0] + shift).view(mean.shape), within.view(mean.shape)


@planned(1024)
def _weights(share: StatisticsShare, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The part of all elements of a column that each rank has, and the rank with most of them, (ranks, 1, columns)."""
    weights = torch.tensor(share.counts, dtype=dtype, device=device)[:, None] / share.total
    return weights, weights.argmax(0, keepdim=True)


def _summed(mean: Tensor, weight: Tensor, within: Tensor, share: StatisticsShare) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all ranks, by one allreduce of first and second moments in float64.

    In float64, subtracting the mean's square loses less than float32's rounding of the elements themselves.

    Args:
        weight: this rank's part of all elements.
        within: ``weight`` times its variance, in float64.
    """
    first, dtype = mean.double(), mean.dtype
    weighted = first * weight
    mean, second = all_reduced(torch.stack([weighted, within + first * weighted]), share.group).unbind()
    return mean.to(dtype), (second - mean.square()).clamp_(min=0).to(dtype)


def moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each row of (outer, rows, inner...) on this rank; zeros where there is nothing."""
    dtype = precise(rows.dtype)
    if not rows.numel():
        zeros = rows.new_zeros(rows.shape[1], dtype=dtype)
        return zeros, zeros
    if rows.dtype is not dtype:
        rows = rows.to(dtype)
    if type(rows) is Tensor or not is_traced(rows):
        return torch.batch_norm_update_stats(rows, None, None, 0.0)
    # A compiler takes these into its loops, and calls the other one as it is.
    variance, mean = torch.var_mean(rows, [0, *range(2, rows.dim())], correction=0)
    return mean, variance
