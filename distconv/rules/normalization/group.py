"""Group and instance normalization: statistics of each sample over groups of channels, and space.

If no group has channels on two ranks, a rank has some of the groups whole, and only space may be shared. If a group
spans several ranks, they exchange a table of all groups, in which each fills in its own share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

from distconv.rules.normalization.batch import batch_norm
from distconv.rules.normalization.rows import Over, Rows, normalized, statistics
from distconv.rules.normalization.running import move
from distconv.rules.normalization.shares import (
    StatisticsShare,
    boxes_of_members,
    check_vectors,
    moments,
    of_all,
    split_axes,
    statistics_share,
    vectors_here,
)
from distconv.rules.operands.channel_split import norm_input
from distconv.rules.operands.own_parts import as_own_part, wrapped
from distconv.rules.operands.sums import precise
from distconv.rules.registry import above_autograd
from distconv.tensors.layouts import Layout, dim_axes, input_layout, local_box, owners
from distconv.transfer.collectives import all_reduced
from distconv.transfer.group import joint_group, joint_order
from distconv.transfer.tracing import constant, planned

aten = torch.ops.aten


Statistics = Callable[[], tuple[Tensor, Tensor]]
"""Mean and biased variance (samples here, columns) that a norm has found, in the type in which sums are kept."""


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups that this rank keeps statistics of."""

    columns: int  # The number of groups: the rank's own, or all if some span several ranks.
    index: tuple[int, ...]  # The column of each of this rank's channels.
    share: StatisticsShare | None  # None where all of every group's elements are on this rank.
    total: int  # Elements of a group.
    apart: bool  # Whether some group has channels on several ranks.


@planned(4096)
def groups_of(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], groups: int) -> Groups:
    """Of a tensor of global ``shape`` whose channels divide into so many groups."""
    size = shape[1] // groups
    along = dim_axes(mesh, placements, 1)
    apart = any(start % size for start, stop in owners(mesh, along, shape[1]) if start < stop)
    axes = split_axes(mesh, placements, range(1 if apart else 2, len(shape)))
    (first, last) = local_box(mesh, placements, shape)[1]
    before = 0 if apart else first // size
    columns = groups if apart else -(-last // size) - before
    index = tuple(channel // size - before for channel in range(first, last))
    total = size * math.prod(shape[2:])
    if not axes:
        return Groups(columns, index, None, total, apart)
    counts = []
    for box in boxes_of_members(mesh, placements, shape, axes):
        positions = math.prod(stop - start for start, stop in box[2:])
        has = [0] * columns
        for channel in range(*box[1]):
            has[channel // size - before] += positions
        counts.append(tuple(has) if apart else (size * positions,))
    among = StatisticsShare(joint_group(mesh, axes), joint_order(mesh, axes)[1], tuple(counts), total)
    return Groups(columns, index, among, total, apart)


@planned(4096)
def _columns(groups: Groups, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The column of each of this rank's channels, and that of every channel of so many samples, one after another."""
    with torch.inference_mode(False):  # a call that autograd records may save these numbers later
        index = torch.tensor(groups.index, dtype=torch.int64, device=device)
        return index, (torch.arange(samples, device=device)[:, None] * groups.columns + index).flatten()


@torch.no_grad()
def _statistics(local: Tensor, groups: Groups, index: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all ranks, those of the columns of each sample one after another."""
    samples, channels, positions = local.shape[0], local.shape[1], math.prod(local.shape[2:])
    if not groups.apart:
        rows = local.reshape(1, samples * groups.columns, channels // max(groups.columns, 1) * positions)
        return moments(rows) if groups.share is None else of_all(*moments(rows), groups.share)
    assert groups.share is not None, "a group is on several ranks"
    means, variances = (v.view(samples, channels) for v in moments(local.reshape(1, samples * channels, positions)))
    empty = means.new_zeros(samples, groups.columns)
    has = empty[:1].index_add(1, index, torch.ones_like(means[:1])).clamp(min=1)
    mean = empty.index_add(1, index, means) / has
    variance = empty.index_add(1, index, variances + (means - mean[:, index]).square()) / has
    mean, variance = of_all(mean, variance, groups.share)
    return mean.flatten(), variance.flatten()


def group_normalized(
    local: Tensor, weight: Tensor | None, bias: Tensor | None, groups: Groups, eps: float
) -> tuple[Tensor, Statistics]:
    """This rank's y, from its part of x and its channels' parameters; and the statistics. y is differentiable."""
    here, own, positions = local.shape[0], local.shape[1], math.prod(local.shape[2:])
    if groups.share is None and local.numel():
        sizes = here, own, positions, groups.columns
        y, means, inverses = torch.native_group_norm(local.contiguous(), weight, bias, *sizes, eps)

        def of_kernel() -> tuple[Tensor, Tensor]:
            wide = precise(means.dtype)  # of a half type the kernel gives means of it
            return means.to(wide), inverses.to(wide).pow(-2) - eps

        return y, of_kernel
    index, of_rows = (constant(columns, local) for columns in _columns(groups, here, local.device))
    over = Over(groups.share, groups.total, here * groups.columns, of_rows)
    mean, variance = _statistics(local, groups, index)
    how = Rows(eps, over, (1, here * own, positions), (here, own))
    y = normalized(local, weight, bias, mean[of_rows], variance[of_rows], how)
    return y, lambda: (mean.view(here, groups.columns), variance.view(here, groups.columns))


def _grouped(
    func: Any, x: Tensor, group: int, weight: Tensor | None, bias: Tensor | None, eps: float, copies: bool = False
) -> tuple[DTensor, Layout, Statistics]:
    """y, its layout, and this rank's statistics of each (sample, group). ``copies``: backward reads copies."""
    mesh, placements = norm_input(func, x, weight, bias)
    channels = x.shape[1]
    check_vectors(func, channels, weight=weight, bias=bias)
    if group < 1 or channels % group:
        raise RuntimeError(f"{func}: {channels} channels do not divide into {group} groups")
    groups = groups_of(mesh, tuple(placements), tuple(x.shape), group)
    local, (w, b) = as_own_part(x, mesh, placements), vectors_here(mesh, placements, weight, bias)
    if copies:
        w, b = (v if v is None else v.clone() for v in (w, b))
    y, statistics = group_normalized(local, w, b, groups, eps)
    return wrapped(y, mesh, placements, x.shape), (mesh, placements), statistics


@above_autograd("aten::group_norm")
def group_norm(
    x: Tensor, group: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> DTensor:
    """y of a distributed input, or of a plain one with distributed parameters."""
    return _grouped(aten.group_norm.default, x, group, weight, bias, eps)[0]


# torch makes of it a batch norm of a view that mixes samples and channels.
@above_autograd("aten::instance_norm")
def instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> DTensor:
    """Group norm with a group per channel; the running statistics are the means of the samples'."""
    running_mean, running_var, use_input_stats, momentum, eps, *_ = rest
    if not use_input_stats:
        return batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)
    func, (samples, channels) = aten.instance_norm.default, x.shape[:2]
    if not samples and weight is not None:  # as torch, which reads the first sample's copy of the weight
        raise IndexError(f"{func}: an input {tuple(x.shape)} has no samples, and there is a weight")
    check_vectors(func, channels, running_mean=running_mean, running_variance=running_var)
    # Torch repeats the vectors for each sample, so backward does not see what is written to them since.
    y, (mesh, placements), statistics = _grouped(func, x, channels, weight, bias, eps, copies=True)
    # As torch: without positions they stay as they are; without samples they are no numbers.
    if running_mean is not None and running_var is not None and (x.numel() or not samples):
        with torch.no_grad():
            mean, variance = statistics()
            positions = math.prod(x.shape[2:])
            unbiased = variance * (positions / max(positions - 1, 1))
            sums = torch.stack([mean.sum(0), unbiased.sum(0)])
            over = statistics_share(mesh, tuple(placements), tuple(x.shape), (0,))
            if over is not None:
                sums = all_reduced(sums, over.group)
            for buffer, value in zip((running_mean, running_var), (sums / samples).unbind(), strict=True):
                move(buffer, value, mesh, dim_axes(mesh, placements, 1), momentum)
    return y


@above_autograd("aten::layer_norm")
def layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> DTensor:
    """y of a distributed input, or of a plain one with distributed parameters, whose last dims have this shape."""
    func = torch.ops.aten.layer_norm.default
    mesh, placements = input_layout(func, x, weight, bias)
    lead = x.dim() - len(shape)
    if lead < 0 or list(x.shape[lead:]) != list(shape):
        raise RuntimeError(f"{func}: an input {tuple(x.shape)} does not end in the normalized shape {list(shape)}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and list(vector.shape) != list(shape):
            raise RuntimeError(f"{func}: its {name} has shape {tuple(vector.shape)}; accepted: {tuple(shape)}")
    of_vectors = tuple(
        Shard(p.dim - lead) if isinstance(p, Shard) and p.dim >= lead else Replicate() for p in placements
    )
    summed = [axis for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim < lead]
    local, w, b = (
        as_own_part(x, mesh, placements),
        *(None if vector is None else as_own_part(vector, mesh, of_vectors, summed) for vector in (weight, bias)),
    )
    among = statistics_share(mesh, tuple(placements), tuple(x.shape), tuple(range(lead, x.dim())))
    if among is None and 0 not in shape:  # also of no rows: backward then reads the same parameters on every rank
        y = functional.layer_norm(local, shape, w, b, eps)
    else:
        rows = 1, math.prod(local.shape[:lead]), math.prod(local.shape[lead:])
        mean, variance = statistics(local.reshape(rows), among)
        y = normalized(local, None, None, mean, variance, Rows(eps, Over(among, math.prod(shape)), rows))
        y = y if w is None else y * w.to(y.dtype)
        y = y if b is None else y + b.to(y.dtype)
    return wrapped(y, mesh, placements, x.shape)
