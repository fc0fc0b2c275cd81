"""Adaptive pools: maximum and average.

Their windows may span all ranks, so partial results move, not inputs: each rank reduces its own part of every window,
and the owner of the output combines them. An output of extent 1 is replicated along the axis that sharded its dim:
every rank gets it, ready for a linear layer or a gate. Its gradient may be sharded: layers after the pool shard its
channels anew, where axes of channels had come to shard dims of space.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from distconv.rules.operands.layouts import part_of
from distconv.rules.operands.sums import lowest, precise
from distconv.rules.pooling.operator import (
    adaptive,
    cut_as_gradient,
    forward_of,
    moved_positions,
    placed,
    shaped_like,
    spatial_dims,
)
from distconv.rules.registry import above_autograd, rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import coordinate, input_layout, local_box, owners, shard_axes
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.local_part import local_as
from distconv.transfer.needs import Piece, window
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import EMPTY, Interval, intersect, length


@dataclass(frozen=True)
class Bins:
    """One sharded dim of an adaptive pool, as this rank sees it."""

    dim: int
    own: Interval  # Inputs that this rank owns.
    parts: tuple[Interval, ...]
    """For every output whose window contains some of this rank's inputs: which of them, counted from its first."""
    counts: tuple[int, ...]  # The number of elements in the whole window of each such output.
    kept: Interval  # Outputs that this rank has in the end.
    partials: Exchange  # Fetches the partial results of the local outputs.
    runs: tuple[Interval, ...]  # Which of the local outputs the fetched partial results are for, run by run.
    grads: Exchange | None
    """Fetches the gradients of the outputs whose windows this rank's inputs are in; None where all ranks have them."""

    def split(self, x: Tensor) -> list[Tensor]:
        """This rank's part of each window."""
        return [x.narrow(self.dim, start, stop - start) for start, stop in self.parts]

    def fetch(self, partials: Sequence[Tensor], x: Tensor) -> Tensor:
        """The partial results of the local outputs, from those of the parts of x."""
        return self.partials.fetch(torch.cat([*partials], self.dim) if partials else x.narrow(self.dim, 0, 0))

    def full_like_outputs(self, x: Tensor, value: float) -> Tensor:
        """Room for the local outputs, full of a value."""
        return x.new_full([*x.shape[: self.dim], length(self.kept), *x.shape[self.dim + 1 :]], value)

    def pairs(self, kept: Tensor, fetched: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(local outputs, fetched partial results for them), run by run."""
        position = 0
        for start, stop in self.runs:
            yield (kept.narrow(self.dim, start, stop - start), fetched.narrow(self.dim, position, stop - start))
            position += stop - start

    def reaching(self, y: Tensor) -> Tensor:
        """The outputs, or their gradients, whose windows this rank's inputs are in, from the local ones."""
        return y.narrow(self.dim, 0, len(self.parts)) if self.grads is None else self.grads.fetch(y)


@dataclass(frozen=True)
class AdaptivePlan:
    """An adaptive pool of these shapes on this mesh, on this rank."""

    bins: tuple[Bins, ...]
    local_size: list[int]  # Output size of the local call, which pools the dims that are whole here.
    out_shape: tuple[int, ...]
    placements: tuple[Placement, ...]  # The placements of the output.
    shard: tuple[Interval, ...]  # The inputs that this rank owns, of every spatial dim.


@planned(4096)
def make_adaptive_plan(
    func: Any,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    size: tuple[int, ...],
) -> AdaptivePlan:
    """Checks the arguments as one process would, on the whole shapes, and derives the plan."""
    if 0 in shape[1:]:  # averages without data are not checked by torch
        raise RuntimeError(f"{func}: an input {shape} has no elements in a dim other than that of samples")
    result = func(torch.empty(shape, dtype=dtype, device="meta"), size)
    out_shape = tuple((result if isinstance(result, Tensor) else result[0]).shape)
    axes = shard_axes(mesh, placements, first=len(shape) - len(size))
    after, local_size, bins = list(placements), list(size), []
    for at in range(len(size)):
        dim = len(shape) - len(size) + at
        if dim not in axes:
            continue
        side = _bins(mesh, axes[dim], dim, shape[dim], size[at])
        if size[at] == 1:
            after = [Replicate() if axis in axes[dim] else of for axis, of in enumerate(after)]
        local_size[at] = length(side.own)
        bins.append(side)
    return AdaptivePlan(
        tuple(bins), local_size, out_shape, tuple(after), local_box(mesh, placements, shape)[-len(size) :]
    )


def _bins(mesh: DeviceMesh, axes: tuple[int, ...], dim: int, extent: int, outputs: int) -> Bins:
    rank = coordinate(mesh, axes)
    windows = [(o * extent // outputs, -(-(o + 1) * extent // outputs)) for o in range(outputs)]
    inputs, owned = owners(mesh, axes, extent), owners(mesh, axes, outputs)
    ranks = len(inputs)
    kept = ((0, 1),) * ranks if outputs == 1 else owned
    touched = []
    for interval in inputs:
        reached = [o for o, span in enumerate(windows) if intersect(span, interval) != EMPTY]
        touched.append((reached[0], reached[-1] + 1) if reached else EMPTY)
    # The partial results of all ranks, one rank after the other, as one long dim.
    offsets = [sum(length(before) for before in touched[:index]) for index in range(ranks + 1)]
    wanted = [[(r, intersect(touched[r], here)) for r in range(ranks)] for here in kept]
    needs = tuple(
        tuple(Piece(length(run), offsets[r] + run[0] - touched[r][0]) for r, run in runs if run != EMPTY)
        for runs in wanted
    )
    own, start = inputs[rank], kept[rank][0]
    mine = range(*touched[rank])
    return Bins(
        dim,
        own,
        tuple((max(windows[o][0], own[0]) - own[0], min(windows[o][1], own[1]) - own[0]) for o in mine),
        tuple(length(windows[o]) for o in mine),
        kept[rank],
        exchange(mesh, axes, dim, tuple(itertools.pairwise(offsets)), needs),
        tuple((run[0] - start, run[1] - start) for _, run in wanted[rank] if run != EMPTY),
        None if outputs == 1 else exchange(mesh, axes, dim, owned, tuple(window(span, outputs) for span in touched)),
    )


def _planned(func: Any, x: DTensor, size: Sequence[int]) -> tuple[AdaptivePlan, DeviceMesh]:
    mesh, placements = input_layout(func, x)
    return make_adaptive_plan(func, mesh, placements, tuple(x.shape), x.dtype, tuple(size)), mesh


def _resized(shape: Sequence[int], size: Sequence[int]) -> list[int]:
    return [*shape[: len(shape) - len(size)], *size]


@rule("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d")
def adaptive_average(func: Any, x: DTensor, size: list[int]) -> DTensor:
    """The mean of each window [floor(o I / O), ceil((o + 1) I / O))."""
    plan, mesh = _planned(func, x, size)
    return wrap(averaged(func, x._local_tensor, plan), mesh, plan.placements, plan.out_shape)


def averaged(func: Any, local: Tensor, plan: AdaptivePlan) -> Tensor:
    """This rank's averages, from its part of the input. Collective where a dim of windows is sharded."""
    shape = _resized(local.shape, plan.local_size)
    # Means of means are rounded once, at the end, as the mean is that one process takes at once.
    y = local.to(precise(local.dtype)) if plan.bins else local
    if list(local.shape) != shape or not plan.bins:
        y = func(y, plan.local_size) if local.numel() and 0 not in shape else y.new_zeros(shape)
    for side in plan.bins:
        y = _mean(side, y)
    return y.to(local.dtype)


def _mean(side: Bins, x: Tensor) -> Tensor:
    sums = [part.sum(side.dim, keepdim=True) for part in side.split(x)]
    means = side.fetch([part.div_(count) for part, count in zip(sums, side.counts, strict=True)], x)
    y = side.full_like_outputs(x, 0)
    for kept, mean in side.pairs(y, means):
        kept.add_(mean)
    return y


@above_autograd("aten::adaptive_avg_pool2d")
@above_autograd("aten::adaptive_avg_pool3d")
def whole_average(x: Tensor, size: Sequence[int]) -> Any:
    """The same: torch makes a mean of these operators where the output size is 1."""
    return adaptive("avg", len(size))(x, size)


@rule("aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward")
def adaptive_average_backward(func: Any, grad: Tensor, x: DTensor) -> DTensor:
    """Every gradient, over its window's count, goes to all elements of the window."""
    x = cut_as_gradient(x, grad)
    plan, mesh = _planned(forward_of(func), x, grad.shape[-spatial_dims(func) :])
    dx = averaged_backward(func, part_of(grad, mesh, plan.placements), x._local_tensor, plan)
    return wrap(dx, mesh, x.placements, x.shape)


def averaged_backward(func: Any, local: Tensor, x: Tensor, plan: AdaptivePlan) -> Tensor:
    """dL/dx of this rank's part, from that of its averages; of x only the form is read. Collective as forward is."""
    dtype, shape = local.dtype, x.shape
    if plan.bins:
        local = local.to(precise(dtype))
    for side in reversed(plan.bins):
        local = _spread(side, side.reaching(local))
    if list(local.shape) != list(shape) or not plan.bins:
        like = shaped_like(x, shape).to(local.dtype)
        local = func(local.contiguous(), like) if local.numel() else local.new_zeros(shape)
    return local.to(dtype)


def _spread(side: Bins, grad: Tensor) -> Tensor:
    dim = side.dim
    result = grad.new_zeros([*grad.shape[:dim], length(side.own), *grad.shape[dim + 1 :]])
    for at, (part, count) in enumerate(zip(side.split(result), side.counts, strict=True)):
        part.add_(grad.narrow(dim, at, 1) / count)
    return result


@rule("aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d")
def adaptive_maximum(func: Any, x: DTensor, size: list[int]) -> tuple[DTensor, DTensor]:
    """The maximum of each window and its flat position in the whole spatial input, the first of equal ones."""
    plan, mesh = _planned(func, x, size)
    local, spatial = x._local_tensor, len(size)
    shape = _resized(local.shape, plan.local_size)
    if local.numel() and 0 not in shape:
        y, index = func(local, plan.local_size)
        index = moved_positions(index, local.shape[-spatial:], [start for start, _ in plan.shard], x.shape[-spatial:])
    else:
        y, index = local.new_empty(shape), local.new_empty(shape, dtype=torch.int64)
    for side in plan.bins:
        y, index = _largest(side, y, index)
    return wrap(y, mesh, plan.placements, plan.out_shape), wrap(index, mesh, plan.placements, plan.out_shape)


_NOWHERE = torch.iinfo(torch.int64).max


def _largest(side: Bins, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    found = [_first_of(part, place, side.dim) for part, place in zip(side.split(x), side.split(index), strict=True)]
    values, places = side.fetch([value for value, _ in found], x), side.fetch([place for _, place in found], index)
    y, where = side.full_like_outputs(x, lowest(x.dtype, True)), side.full_like_outputs(index, _NOWHERE)
    for (best, value), (at, place) in zip(side.pairs(y, values), side.pairs(where, places), strict=True):
        top, first = _first_of(torch.stack([best, value]), torch.stack([at, place]), 0)
        best.copy_(top[0])
        at.copy_(first[0])
    return y, where


def _first_of(x: Tensor, index: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    top = x.amax(dim, keepdim=True)
    return top, torch.where((x == top) | x.isnan(), index, _NOWHERE).amin(dim, keepdim=True)


@rule("aten::adaptive_max_pool2d_backward", "aten::adaptive_max_pool3d_backward")
def adaptive_maximum_backward(func: Any, grad: Tensor, x: DTensor, indices: DTensor) -> DTensor:
    """Every gradient goes to where the maximum was found."""
    spatial, x = spatial_dims(func), cut_as_gradient(x, grad)
    plan, mesh = _planned(forward_of(func), x, grad.shape[-spatial:])
    local, index = part_of(grad, mesh, plan.placements), local_as(indices, mesh, plan.placements)
    own, lead = x._local_tensor, x.dim() - spatial
    if not plan.bins and own.numel():
        return wrap(func(local.contiguous(), own, index), mesh, x.placements, x.shape)
    for side in reversed(plan.bins):
        local, index = side.reaching(local), side.reaching(index)
    dx = own.new_zeros(own.shape)
    if dx.numel():
        place, here = placed(index, x.shape[lead:], plan.shard)
        dx.view(*own.shape[:lead], -1).scatter_add_(-1, place.flatten(lead), torch.where(here, local, 0).flatten(lead))
    return wrap(dx, mesh, x.placements, x.shape)
