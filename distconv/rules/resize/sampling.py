"""Sampling at the points of a grid (grid_sample), in 2-D and 3-D: maps and points are sharded.

The values of a rank's points decide which elements it reads, so no other rank can select these for it. Instead the map
comes to all ranks in blocks, one rank's share after the other, and each rank adds the contribution of a block's
elements to its points. A rank never has more than its own share of the map and one other. Backward sends the blocks
once more, and sends the gradient of each to its owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from distconv.rules.operands.own_parts import apply, as_own_part, wrapped
from distconv.rules.operands.sums import precise
from distconv.rules.registry import above_autograd
from distconv.rules.whole import permit
from distconv.tensors.layouts import dim_axes, find_layout, owners, placements_on, replicated
from distconv.transfer.exchange import Exchange, Exchanges, exchange
from distconv.transfer.needs import window
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Interval

aten = torch.ops.aten

NEAREST, BICUBIC = 1, 2  # aten's numbers of the modes
ZEROS, BORDER, REFLECTION = 0, 1, 2

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class SamplingPlan:
    """The layouts of the map x (N, C, space...), the grid (N, space..., dims) and the result (N, C, space...)."""

    x: Placements
    grid: Placements
    result: Placements

    def repeated(self) -> list[int]:
        """The axes along which ranks sample the same elements at different points."""
        return [
            a for a, (p, q) in enumerate(zip(self.x, self.result, strict=True)) if p.is_replicate() and q.is_shard()
        ]

    def of_channels(self) -> list[int]:
        """The axes along which ranks sample different channels at the same points."""
        return [axis for axis, placement in enumerate(self.x) if placement == Shard(1)]


@planned(1024)
def sampling_plan(mesh: DeviceMesh, x: Placements, grid: Placements, samples: int, dims: int) -> SamplingPlan:
    """Points stay where they are; where only the map is sharded, they are cut as it is."""
    ways: list[tuple[Placement, Placement, Placement]] = []
    for axis, (p, q) in enumerate(zip(x, grid, strict=True)):
        of_x = p.dim if isinstance(p, Shard) else None
        of_grid = q.dim if isinstance(q, Shard) else None
        if of_x == 0 or (of_grid == 0 and (of_x is None or samples >= mesh.size(axis))):
            ways.append((Shard(0), Shard(0), Shard(0)))
        elif of_x == 1:
            ways.append((Shard(1), Replicate(), Shard(1)))
        elif of_x is None and of_grid is None:
            ways.append((Replicate(), Replicate(), Replicate()))
        else:
            at = of_grid if of_grid is not None and 1 <= of_grid <= dims else of_x - 1 if of_x is not None else 1
            ways.append((p, Shard(at), Shard(at + 1)))
    first, second, result = zip(*ways, strict=True)
    return SamplingPlan(first, second, result)


@dataclass(frozen=True)
class MapBlock:
    """One share of the map's space: its interval of every dim of space, and the exchange that sends it to all."""

    box: tuple[Interval, ...]
    transfer: Exchanges


@planned(1024)
def _blocks(mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...]) -> tuple[MapBlock, ...]:
    sides: list[list[tuple[Interval, Exchange | None]]] = []
    for dim in range(2, len(shape)):
        axes = dim_axes(mesh, placements, dim)
        owned = owners(mesh, axes, shape[dim])
        sides.append([])
        for start, stop in owned:
            if stop > start:
                needs = (window((start, stop), shape[dim]),) * len(owned)
                sides[-1].append(((start, stop), exchange(mesh, axes, dim, owned, needs) if axes else None))
    return tuple(
        MapBlock(tuple(interval for interval, _ in side), Exchanges([each for _, each in side if each is not None]))
        for side in itertools.product(*sides)
    )


@dataclass(frozen=True)
class Points:
    """Positions of points in the map, in elements: (N, points, dims), the dims in the order of the map's space."""

    at: Tensor
    slope: Tensor  # Of a position by the grid's coordinate.
    nearest: bool

    def corners(self) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """(positions, weight, derivative of the weight by each position) of the elements around each point."""
        if self.nearest:
            yield self.at.round(), torch.ones_like(self.at[..., 0]), []
            return
        low = self.at.floor()
        for corner in itertools.product((0, 1), repeat=self.at.shape[-1]):
            upper = torch.tensor(corner, device=low.device, dtype=low.dtype)
            positions = low + upper
            shares = 1 - (self.at - positions).abs()
            signs = (2 * upper - 1).expand_as(shares)
            derivatives = [
                signs[..., k] * torch.cat([shares[..., :k], shares[..., k + 1 :]], -1).prod(-1)
                for k in range(len(corner))
            ]
            yield positions, shares.prod(-1), derivatives


def points(grid: Tensor, space: Sequence[int], mode: int, padding: int, align: bool) -> Points:
    """The points of a grid (N, ..., dims) in a map of such extents; those outside go where torch puts them."""
    coordinates = grid.flatten(1, -2).flip(-1)
    size = torch.tensor(list(space), device=grid.device, dtype=grid.dtype)
    if align:
        at, slope = (coordinates + 1) / 2 * (size - 1), (size - 1) / 2
    else:
        at, slope = ((coordinates + 1) * size - 1) / 2, size / 2
    slope = slope.expand_as(at)
    if padding == REFLECTION:
        least, span = (torch.zeros_like(size), size - 1) if align else (torch.full_like(size, -0.5), size)
        away = (at - least).abs()
        turns = torch.where(span > 0, (away / span).floor(), 0)
        rest = torch.where(span > 0, away.fmod(span), 0)
        back = turns.remainder(2) == 1
        slope = torch.where(at < least, -slope, slope) * torch.where(back, -1, 1)
        at = torch.where(back, span - rest, rest) + least
    if padding != ZEROS:
        slope = torch.where((at <= 0) | (at >= size - 1), 0, slope)
        at = torch.minimum(at.clamp(min=0), size - 1)
    return Points(at, slope, mode == NEAREST)


def _read(positions: Tensor, weight: Tensor, box: Sequence[Interval]) -> tuple[Tensor, Tensor]:
    """(flat positions in a block, weight) of elements; of those elsewhere the first, with weight 0."""
    start = torch.tensor([a for a, _ in box], device=positions.device, dtype=positions.dtype)
    extent = torch.tensor([b - a for a, b in box], device=positions.device, dtype=positions.dtype)
    within = positions - start
    inside = ((within >= 0) & (within < extent)).all(-1)
    whole = torch.where(inside.unsqueeze(-1), within, 0).long()
    flat = whole[..., 0]
    for k, (a, b) in enumerate(box[1:], 1):
        flat = flat * (b - a) + whole[..., k]
    return flat, torch.where(inside, weight, 0)


@dataclass(frozen=True)
class Sampling:
    """What an operator does with this rank's parts of a map and of a grid."""

    blocks: tuple[MapBlock, ...]
    space: torch.Size
    options: tuple[int, int, bool]  # Mode, padding and whether corners align, as the operator has them.

    def points(self, grid: Tensor, dtype: torch.dtype) -> Points:
        return points(grid.to(dtype), self.space, *self.options)


class _Sampled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Tensor, work: Sampling) -> Tensor:
        ctx.save_for_backward(x, grid)
        ctx.work = work
        dtype, (samples, channels) = precise(x.dtype), x.shape[:2]
        at = work.points(grid, dtype)
        result = torch.zeros(samples, channels, at.at.shape[1], dtype=dtype, device=x.device)
        for block in work.blocks:
            values = block.transfer.fetch(x).to(dtype).flatten(2)
            for positions, weight, _ in at.corners():
                flat, own = _read(positions, weight, block.box)
                read = flat.unsqueeze(1).expand(-1, channels, -1)
                result += values.gather(2, read) * own.unsqueeze(1)
        return result.view(samples, channels, *grid.shape[1:-1]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, grid = ctx.saved_tensors
        work, dtype = ctx.work, precise(x.dtype)
        at, grad = work.points(grid, dtype), grad.to(dtype).flatten(2)
        dx = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        by_position = torch.zeros_like(at.at)
        for block in work.blocks:
            fetched = block.transfer.fetch(x)
            values = fetched.to(dtype).flatten(2)
            dvalues = torch.zeros_like(values)
            for positions, weight, derivatives in at.corners():
                flat, own = _read(positions, weight, block.box)
                read = flat.unsqueeze(1).expand(-1, values.shape[1], -1)
                dvalues.scatter_add_(2, read, grad * own.unsqueeze(1))
                if derivatives:
                    along = (grad * values.gather(2, read)).sum(1)
                    for k, derivative in enumerate(derivatives):
                        by_position[..., k] += along * _read(positions, derivative, block.box)[1]
            dx += block.transfer.adjoint(dvalues.view(fetched.shape))
        return dx.to(x.dtype), (by_position * at.slope).flip(-1).view(grid.shape).to(grid.dtype), None


# torch takes it apart into operators that depend on the device.
@above_autograd("aten::grid_sampler")
@above_autograd("aten::grid_sampler_2d")
@above_autograd("aten::grid_sampler_3d")
def sample_grid(x: Tensor, grid: Tensor, mode: int, padding: int, align: bool) -> Tensor:
    """x (N, C, space...) at the points of a grid (N, space..., dims)."""
    func, options = aten.grid_sampler.default, (mode, padding, align)
    mesh, _ = find_layout(x, grid)
    if mode == BICUBIC:
        permit(func, (x, grid), "bicubic; accepted: bilinear and nearest")
        whole = func(as_own_part(x, mesh, replicated(mesh)), as_own_part(grid, mesh, replicated(mesh)), *options)
        return wrapped(whole, mesh, replicated(mesh), whole.shape)
    if grid.shape[0] != x.shape[0] or grid.dim() != x.dim() or grid.shape[-1] != x.dim() - 2:
        raise RuntimeError(f"{func}: an input {tuple(x.shape)} with a grid {tuple(grid.shape)}")
    plan = sampling_plan(mesh, placements_on(x, mesh), placements_on(grid, mesh), x.shape[0], x.dim() - 2)
    work = Sampling(_blocks(mesh, plan.x, tuple(x.shape)), x.shape[2:], options)
    own_x = as_own_part(x, mesh, plan.x, plan.repeated())
    own_grid = as_own_part(grid, mesh, plan.grid, plan.of_channels())
    result = apply(_Sampled, own_x, own_grid, work)
    return wrapped(result, mesh, plan.result, (*x.shape[:2], *grid.shape[1:-1]))
