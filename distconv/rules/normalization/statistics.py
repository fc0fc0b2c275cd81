"""Mean and variance of a rank's rows, the ranks that share them, and what follows from them, forward and backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distconv.rules.normalization.combining import Share
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import box_at
from distconv.tensors.mesh import sharded_dims
from distconv.transfer.all_reduce import all_reduced
from distconv.transfer.group import joint_group, joint_order
from distconv.transfer.tracing import is_traced, planned

aten = torch.ops.aten


def split_axes(mesh: DeviceMesh, placements: Sequence[Placement], dims: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes of more than one rank that shard some of the dims."""
    return tuple(axis for axis, dim in sharded_dims(mesh, placements) if dim in dims and mesh.size(axis) > 1)


def boxes_along(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], axes: tuple[int, ...]
) -> list[tuple[tuple[int, int], ...]]:
    """The box of each member of the axes' group, in the group's order."""
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
    here = joint_order(mesh, axes)[1]
    return Share(joint_group(mesh, axes), here, tuple((count,) for count in counts), sum(counts))


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
        # Of a graph, torch 2.13 says that the vectors have the type of rows, unless there is a weight.
        factor = torch.ones_like(mean) if weight is None and is_traced(rows) else weight
        dx, dweight, dbias = aten.native_batch_norm_backward(
            grad, rows, factor, mean, variance, None, None, False, eps, [need_input, True, True]
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
    """The layout of one number per channel beside channels (dim 1) with these placements."""
    return tuple(Shard(0) if placement == Shard(1) else Replicate() for placement in placements)


def vector_gradient(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The layout of the gradient of one number per channel: a partial sum over samples and space."""
    return tuple(Shard(0) if p == Shard(1) else Partial() if isinstance(p, Shard) else Replicate() for p in placements)


def gradients(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    x: Tensor,
    dx: Tensor | None,
    dtype: torch.dtype,
    vectors: Sequence[Tensor | None],
) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """The results of a norm's backward, from dL/dx and one number per channel."""
    of = vector_gradient(placements)
    dweight, dbias = (None if v is None else wrap(v.to(dtype), mesh, of, x.shape[1:2]) for v in vectors)
    return None if dx is None else wrap(dx, mesh, placements, x.shape), dweight, dbias
