"""Batch normalization: ranks that share a channel combine its statistics over samples and space."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from distconv.rules.normalization.rows import Over, Rows, normalized, statistics
from distconv.rules.normalization.running import Found, can_wait, combine_later, move
from distconv.rules.normalization.shares import (
    StatisticsShare,
    check_vectors,
    of_all,
    statistics_share,
    vector_layout,
    vectors_here,
)
from distconv.rules.operands.channel_split import norm_input
from distconv.rules.operands.own_parts import Takes, as_own_part, wrapped
from distconv.rules.registry import above_autograd
from distconv.tensors.layouts import dim_axes
from distconv.tensors.mesh import batch_norm_statistics
from distconv.transfer.local_part import local_as
from distconv.transfer.tracing import planned

Running = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The decisions of a batch norm in training, of given shapes on a mesh, on this rank."""

    mesh: DeviceMesh
    axes: tuple[int, ...]  # The axes that shard the channels.
    whole: StatisticsShare | None
    """The ranks that have elements of a channel, whose statistics the running ones follow."""
    over: Over  # The ranks by whose elements this rank normalizes: ``whole``, or itself alone.


@planned(4096)
def batch_plan(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], own: bool) -> BatchPlan:
    """The plan for a tensor of global ``shape``. ``own``: whether a rank normalizes by its own elements."""
    whole = statistics_share(mesh, placements, shape, (0, *range(2, len(shape))))
    over = Over(whole, math.prod(shape) // max(shape[1], 1))
    if own and whole is not None:
        over = Over(None, whole.counts[whole.here][0])
    return BatchPlan(mesh, dim_axes(mesh, placements, 1), whole, over)


def batch_normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running,
    momentum: float,
    eps: float,
    plan: BatchPlan,
    takes: Takes = (None, None),
) -> Tensor:
    """This rank's y in training, from its part of x and its channels' parameters. Moves the running statistics, which
    are always those of the whole batch, the same on all ranks, even where each rank normalizes by its own.
    Differentiable.
    """
    mean, variance = statistics(x, plan.over.share)
    if running[0] is not None or running[1] is not None:
        _follow(running, mean, variance, momentum, plan)
    return normalized(x, weight, bias, mean, variance, Rows(eps, plan.over, takes=takes))


def _follow(running: Running, mean: Tensor, variance: Tensor, momentum: float, plan: BatchPlan) -> None:
    whole, total = plan.whole, plan.over.total
    if not (whole or plan.over).total:  # a batch without elements moves nothing
        return
    if whole is not None and plan.over.share is None:
        if can_wait(running):
            sharded = (plan.mesh, plan.axes) if plan.axes else None
            combine_later(Found(running, mean, variance, whole, momentum, sharded))
            return
        mean, variance = of_all(mean, variance, whole)
        total = whole.total
    for buffer, value, factor in zip(running, (mean, variance), (1.0, total / max(total - 1, 1)), strict=True):
        if buffer is not None:
            move(buffer, value, plan.mesh, plan.axes, momentum, factor)


@above_autograd("aten::batch_norm")
def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> DTensor:
    """y of a distributed input, or of a plain one with distributed parameters."""
    running_mean, running_var, training, momentum, eps, *_ = rest
    func = torch.ops.aten.batch_norm.default
    mesh, placements = norm_input(func, x, weight, bias)
    running = {"running_mean": running_mean, "running_variance": running_var}
    check_vectors(func, x.shape[1], weight=weight, bias=bias, **running)
    local, (w, b) = as_own_part(x, mesh, placements), vectors_here(mesh, placements, weight, bias)
    if training:
        plan = batch_plan(mesh, tuple(placements), tuple(x.shape), batch_norm_statistics.get(mesh) == "local")
        y = batch_normalized(local, w, b, (running_mean, running_var), momentum, eps, plan)
    elif running_mean is None or running_var is None:
        raise RuntimeError(f"{func}: evaluation without running statistics")
    else:
        of = vector_layout(placements)
        mean, variance = (local_as(vector, mesh, of) for vector in (running_mean, running_var))
        y = normalized(local, w, b, mean, variance, Rows(eps, None))
    return wrapped(y, mesh, placements, x.shape)
