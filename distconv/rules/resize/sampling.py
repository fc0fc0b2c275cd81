"""Sampling at the points of a grid (grid_sample), in 2-D and 3-D: maps and points are sharded.

The values of a rank's points decide which elements it reads, so no other rank can select these for it. Instead the map
comes to all ranks in blocks, one rank's share after the other, and each rank adds the contribution of a block's
elements to its points. A rank never has more than its own share of the map and one other. Backward brings the blocks
once more, and sends the gradient of each to its owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.rules.operands import part_of
from distconv.rules.operands.sums import all_reduce, precise
from distconv.rules.registry import rule
from distconv.rules.whole import whole_or_refused
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import added_up, dim_axes, find_layout, owners, replicated
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.needs import window
from distconv.transfer.tracing import planned
from distconv.transfer.unsharding import Unsharding
from mucudnn.convolution.geometry import Interval

BILINEAR, NEAREST, BICUBIC = 0, 1, 2  # aten's numbers of the modes
ZEROS, BORDER, REFLECTION = 0, 1, 2

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class SamplingPlan:
    """The layouts of the map x (N, C, space...), the grid (N, space..., dims) and the result (N, C, space...)."""

    x: Placements
    grid: Placements
    result: Placements

    def alike(self) -> list[int]:
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
class Block:
    """One share of the map's space: its interval of every dim of space, and what brings it to all."""

    box: tuple[Interval, ...]
    transfer: Unsharding


@planned(1024)
def _blocks(mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...]) -> tuple[Block, ...]:
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
        Block(tuple(interval for interval, _ in side), Unsharding([each for _, each in side if each is not None]))
        for side in itertools.product(*sides)
    )


@dataclass(frozen=True)
class Points:
    """Positions of points in the map, in elements: (N, points, dims), the dims in the order of the map's space."""

    at: Tensor
    slope: Tensor
    """Of a position by the grid's coordinate."""
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


class _Sampling:
    """The tensors of one operator, as this rank has them."""

    def __init__(self, func: Any, x: Tensor, grid: Tensor, mode: int, padding: int, align: bool) -> None:
        if grid.shape[0] != x.shape[0] or grid.dim() != x.dim() or grid.shape[-1] != x.dim() - 2:
            raise RuntimeError(f"{func}: an input {tuple(x.shape)} with a grid {tuple(grid.shape)}")
        self.mesh = find_layout(x, grid)[0]
        lying = [tuple(added_up(t.placements)) if isinstance(t, DTensor) else replicated(self.mesh) for t in (x, grid)]
        self.plan = sampling_plan(self.mesh, lying[0], lying[1], x.shape[0], x.dim() - 2)
        self.dtype = precise(x.dtype)
        self.x = part_of(x, self.mesh, self.plan.x)
        self.grid = part_of(grid, self.mesh, self.plan.grid)
        self.blocks = _blocks(self.mesh, self.plan.x, tuple(x.shape))
        self.points = points(self.grid.to(self.dtype), x.shape[2:], mode, padding, align)
        self.shape = (*x.shape[:2], *grid.shape[1:-1])

    def forward(self) -> Tensor:
        samples, channels = self.x.shape[:2]
        result = torch.zeros(samples, channels, self.points.at.shape[1], dtype=self.dtype, device=self.x.device)
        for block in self.blocks:
            values = block.transfer.fetch(self.x).to(self.dtype).flatten(2)
            for positions, weight, _ in self.points.corners():
                flat, own = _read(positions, weight, block.box)
                read = flat.unsqueeze(1).expand(-1, channels, -1)
                result += values.gather(2, read) * own.unsqueeze(1)
        return result.view(samples, channels, *self.grid.shape[1:-1]).to(self.x.dtype)

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's parts of the map and of the grid."""
        grad = grad.to(self.dtype).flatten(2)
        dx = torch.zeros_like(self.x, dtype=self.dtype, memory_format=torch.contiguous_format)
        by_position = torch.zeros_like(self.points.at)
        for block in self.blocks:
            fetched = block.transfer.fetch(self.x)
            values = fetched.to(self.dtype).flatten(2)
            dvalues = torch.zeros_like(values)
            for positions, weight, derivatives in self.points.corners():
                flat, own = _read(positions, weight, block.box)
                read = flat.unsqueeze(1).expand(-1, values.shape[1], -1)
                dvalues.scatter_add_(2, read, grad * own.unsqueeze(1))
                if derivatives:
                    along = (grad * values.gather(2, read)).sum(1)
                    for k, derivative in enumerate(derivatives):
                        by_position[..., k] += along * _read(positions, derivative, block.box)[1]
            dx += block.transfer.adjoint(dvalues.view(fetched.shape))
        dx = all_reduce(dx, self.mesh, self.plan.alike())
        dgrid = all_reduce((by_position * self.points.slope).flip(-1), self.mesh, self.plan.of_channels())
        return dx.to(self.x.dtype), dgrid.view(self.grid.shape).to(self.grid.dtype)


@rule("aten::grid_sampler_2d", "aten::grid_sampler_3d")
def sample(func: Any, x: Tensor, grid: Tensor, mode: int, padding: int, align: bool) -> DTensor:
    """x (N, C, space...) at the points of a grid (N, space..., dims)."""
    if mode == BICUBIC:
        return whole_or_refused(func, (x, grid, mode, padding, align), {}, "bicubic; accepted: bilinear and nearest")
    work = _Sampling(func, x, grid, mode, padding, align)
    return wrap(work.forward(), work.mesh, work.plan.result, work.shape)


@rule("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward")
def sample_backward(
    func: Any, grad: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, align: bool, wanted: list[bool]
) -> tuple[DTensor | None, DTensor | None]:
    """The gradients of x and of the grid."""
    if mode == BICUBIC:
        return whole_or_refused(func, (grad, x, grid, mode, padding, align, wanted), {}, "bicubic")
    work = _Sampling(func, x, grid, mode, padding, align)
    dx, dgrid = work.backward(part_of(grad, work.mesh, work.plan.result))
    return (
        wrap(dx, work.mesh, work.plan.x, x.shape) if wanted[0] else None,
        wrap(dgrid, work.mesh, work.plan.grid, grid.shape) if wanted[1] else None,
    )


@rule("aten::cudnn_grid_sampler")
def sample_by_cudnn(func: Any, x: Tensor, grid: Tensor) -> DTensor:
    """What torch calls on a GPU for bilinear sampling with zeros outside and aligned corners."""
    return sample(func, x, grid, BILINEAR, ZEROS, True)


@rule("aten::cudnn_grid_sampler_backward")
def sample_by_cudnn_backward(func: Any, x: Tensor, grid: Tensor, grad: Tensor) -> tuple[DTensor | None, DTensor | None]:
    """The gradients of x and of the grid."""
    return sample_backward(func, grad, x, grid, BILINEAR, ZEROS, True, [True, True])
