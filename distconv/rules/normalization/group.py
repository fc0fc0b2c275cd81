"""Group and instance normalization: statistics of each sample over groups of channels, and space.

If no group has channels on two ranks, a rank has some of the groups whole, and only space may be shared. If a group
spans several ranks, they exchange a table of all groups, in which each fills in its own share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.rules.normalization.combining import Share, combined, of_all
from distconv.rules.normalization.moments import moments, precise
from distconv.rules.normalization.running import move
from distconv.rules.normalization.statistics import (
    Pool,
    boxes_along,
    check_vector,
    gradients,
    normalize,
    normalize_backward,
    share,
    split_axes,
    vector_layout,
)
from distconv.rules.operands.as_gradient import as_gradient
from distconv.rules.operands.channel_split import norm_input
from distconv.rules.registry import above_autograd, rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import dim_axes, layout, local_box, owners
from distconv.transfer.all_reduce import all_reduced
from distconv.transfer.group import joint_group, joint_order
from distconv.transfer.local_part import local_as
from distconv.transfer.tracing import planned

aten = torch.ops.aten


@dataclass(frozen=True)
class Groups:
    """The groups that this rank keeps statistics of."""

    columns: int
    """The number of groups: the rank's own, or all if some span several ranks."""
    index: tuple[int, ...]
    """The column of each of this rank's channels."""
    share: Share | None
    """None where all of every group's elements are on this rank."""
    total: int
    """Elements of a group."""
    kept: tuple[Placement, ...]
    """The layout of a table (samples, groups) of the statistics."""
    apart: bool
    """Whether some group has channels on several ranks."""


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
    kept = tuple(p if p == Shard(0) or (p == Shard(1) and not apart) else Replicate() for p in placements)
    total = size * math.prod(shape[2:])
    if not axes:
        return Groups(columns, index, None, total, kept, apart)
    counts = []
    for box in boxes_along(mesh, placements, shape, axes):
        positions = math.prod(stop - start for start, stop in box[2:])
        has = [0] * columns
        for channel in range(*box[1]):
            has[channel // size - before] += positions
        counts.append(tuple(has) if apart else (size * positions,))
    among = Share(joint_group(mesh, axes), joint_order(mesh, axes)[1], tuple(counts), total)
    return Groups(columns, index, among, total, kept, apart)


def _positions(local: Tensor) -> int:
    return math.prod(local.shape[2:])


def _group_moments(local: Tensor, groups: Groups, index: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (samples here, columns), over all ranks."""
    samples, channels, positions = local.shape[0], local.shape[1], _positions(local)
    if not groups.apart:
        rows = local.reshape(1, samples * groups.columns, channels // max(groups.columns, 1) * positions)
        found = moments(rows) if groups.share is None else of_all(*moments(rows), groups.share)
        mean, variance = (v.view(samples, groups.columns) for v in found)
        return mean, variance
    assert groups.share is not None, "a group lies on several ranks"
    means, variances = (v.view(samples, channels) for v in moments(local.reshape(1, samples * channels, positions)))
    has = torch.zeros(groups.columns, dtype=means.dtype, device=means.device)
    has.index_add_(0, index, torch.ones_like(index, dtype=means.dtype))
    empty = means.new_zeros(samples, groups.columns)
    mean = empty.index_add(1, index, means) / has.clamp(min=1)
    deviations = empty.index_add(1, index, positions * (variances + (means - mean[:, index]).square()))
    return combined(mean, deviations, groups.share)


@rule("aten::native_group_norm")
def group_norm(
    func: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    samples: int,
    channels: int,
    positions: int,
    group: int,
    eps: float,
) -> tuple[DTensor, DTensor, DTensor]:
    """y, and the mean and 1 / sqrt(variance + eps) of each (sample, group)."""
    mesh, placements = norm_input(func, x, weight, bias)
    for name, vector in (("weight", weight), ("bias", bias)):
        check_vector(func, vector, name, channels)
    if group < 1 or channels % group:
        raise RuntimeError(f"{func}: {channels} channels do not divide into {group} groups")
    local, of = local_as(x, mesh, placements), vector_layout(placements)
    w, b = (None if vector is None else local_as(vector, mesh, of) for vector in (weight, bias))
    groups, here = groups_of(mesh, placements, tuple(x.shape), group), local.shape[0]
    if groups.share is None and local.numel():
        sizes = here, local.shape[1], _positions(local), groups.columns
        y, mean, inverse = func(local.contiguous(), w, b, *sizes, eps)
    else:
        index = torch.tensor(groups.index, dtype=torch.int64, device=local.device)
        mean, variance = _group_moments(local, groups, index)
        square = variance + eps
        wide = local.reshape(1, -1, _positions(local)) if local.numel() else local
        w, b = (v if v is None or here == 1 else v.repeat(here) for v in (w, b))
        y = normalize(wide, mean[:, index].flatten(), square[:, index].flatten(), w, b).view(local.shape)
        inverse = torch.rsqrt(square)
    shape = samples, group
    return (
        wrap(y, mesh, placements, x.shape),
        wrap(mean, mesh, groups.kept, shape),
        wrap(inverse, mesh, groups.kept, shape),
    )


@rule("aten::native_group_norm_backward")
def group_norm_backward(
    func: Any,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    samples: int,
    channels: int,
    positions: int,
    group: int,
    mask: list[bool],
) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """dL/dx as x is laid out, dL/dweight and dL/dbias as partial sums over samples and space."""
    mesh, placements = norm_input(func, x, grad, weight)
    placements = as_gradient(placements, grad)
    local, own_grad = local_as(x, mesh, placements), local_as(grad, mesh, placements)
    w = None if weight is None else local_as(weight, mesh, vector_layout(placements))
    groups, here, own = groups_of(mesh, placements, tuple(x.shape), group), local.shape[0], local.shape[1]
    means, inverses = local_as(mean, mesh, groups.kept), local_as(inverse, mesh, groups.kept)
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    if groups.share is None and local.numel():
        arguments = here, own, _positions(local), groups.columns, mask
        dx, dweight, dbias = func(own_grad.contiguous(), local.contiguous(), means, inverses, w, *arguments)
    else:
        shape, dtype = (1, here * own, _positions(local)), precise(local.new_empty(0)).dtype
        index = torch.tensor(groups.index, dtype=torch.int64, device=local.device)
        rows = (torch.arange(here, device=local.device)[:, None] * groups.columns + index).flatten()
        dx, weights, biases = normalize_backward(
            own_grad.reshape(shape),
            local.reshape(shape),
            means.to(dtype).flatten()[rows],
            inverses.to(dtype).flatten()[rows].pow(-2),
            None if w is None else w.to(dtype).repeat(here),
            groups.share,
            groups.total,
            Pool(rows, here * groups.columns),
            mask[0],
        )
        dx = None if dx is None else dx.view(local.shape)
        dweight, dbias = (v.view(here, own).sum(0) for v in (weights, biases))
    vectors = dweight if mask[1] else None, dbias if mask[2] else None
    return gradients(mesh, placements, x, dx, x.dtype if w is None else w.dtype, vectors)


def instance_norm(
    x: DTensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Group norm with a group per channel; the running statistics are the means of the samples'. Differentiable."""
    operator = aten.instance_norm.default
    if not use_input_stats:
        statistics = running_mean, running_var, False, momentum, eps
        return aten.native_batch_norm.default(x, weight, bias, *statistics)[0]
    samples, channels, *space = x.shape
    positions = math.prod(space)
    for name, vector in (("running mean", running_mean), ("running variance", running_var)):
        check_vector(operator, vector, name, channels)
    y, mean, inverse = aten.native_group_norm.default(
        x.contiguous(), weight, bias, samples, channels, positions, channels, eps
    )
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            # Of a half type the kernel gives means of it, a rank without samples those in which sums are kept.
            own, inverses = precise(mean._local_tensor), precise(inverse._local_tensor)
            unbiased = (inverses.pow(-2) - eps) * (positions / max(positions - 1, 1))
            sums = torch.stack([own.sum(0), unbiased.sum(0)])
            over = share(*layout(mean), tuple(mean.shape), (0,))
            if over is not None:
                sums = all_reduced(sums, over.group)
            for buffer, value in zip((running_mean, running_var), (sums / samples).unbind(), strict=True):
                move(buffer, value, mean.device_mesh, dim_axes(*layout(mean), 1), momentum)
    return y


# torch makes of it a batch norm of a view that mixes samples and channels.
@above_autograd("aten::instance_norm")
def instance_norm_of_any(x: Tensor, *arguments: Any) -> Tensor:
    """Instance norm of a distributed input, or of a plain one with distributed parameters."""
    if isinstance(x, DTensor):
        return instance_norm(x, *arguments[:-1])
    return aten.instance_norm.default.decompose(x, *arguments)


@rule("aten::instance_norm")
def instance_norm_alone(func: Any, x: DTensor, *arguments: Any) -> Tensor:
    """In inference mode."""
    return instance_norm(x, *arguments[:-1])
