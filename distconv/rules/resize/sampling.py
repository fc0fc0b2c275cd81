"""Sampling at the points of a grid (grid_sample), in 2-D and 3-D: maps and points are sharded.

The values of a rank's points decide which elements it reads, so no other rank can select these for it. Instead the map
goes to all ranks in pieces, one rank's share after the other, or some of up to 1 MiB together, and each rank adds what
a piece's elements contribute to its points: on a processor only to those points that read one. A rank never has more
than its own share of the map and one piece. Backward sends the pieces once more, and sends the gradient of each to its
owner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from distconv.rules import whole
from distconv.rules.operands.own_parts import apply, as_own_part, wrapped
from distconv.rules.operands.sums import precise
from distconv.rules.registry import above_autograd
from distconv.rules.whole import permit
from distconv.tensors.layouts import dim_axes, find_layout, owners, placements_on, replicated
from distconv.transfer.exchange import Exchange, Exchanges, exchange
from distconv.transfer.needs import window
from distconv.transfer.tracing import has_no_numbers, planned
from mucudnn.convolution.geometry import Interval

aten = torch.ops.aten

NEAREST, BICUBIC = 1, 2  # aten's numbers of the modes
ZEROS, BORDER, REFLECTION = 0, 1, 2
MOST_SELECTED = 0.75  # The share of points above which all are taken: to select some takes time, too.
ROUNDED = 3  # Positions in a piece of n elements that torch makes of coordinates are wrong by at most so many n eps.

Placements = tuple[Placement, ...]


@planned(1024)
def sampling_layouts(
    mesh: DeviceMesh, x: Placements, grid: Placements, samples: int, dims: int
) -> tuple[Placements, Placements, Placements]:
    """The layouts of the map x (N, C, space...), the grid (N, space..., dims) and the result (N, C, space...).

    Points stay where they are; where only the map is sharded, they are cut as it is.
    """
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
    return first, second, result


@dataclass(frozen=True)
class MapPiece:
    """One share of the map's space: its interval of every dim of space, and the exchange that sends it to all."""

    box: tuple[Interval, ...]
    transfer: Exchanges


def _joined(intervals: Sequence[Interval], most: int) -> list[Interval]:
    """Intervals in a row, as few as there are of at most so many elements, or of one of them."""
    found: list[Interval] = []
    for start, stop in intervals:
        is_one = found and stop - found[-1][0] <= most
        found[-1:] = [(found[-1][0], stop)] if is_one else [*found[-1:], (start, stop)]
    return found


@planned(1024)
def _pieces(mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...], small: int) -> tuple[MapPiece, ...]:
    """Shares of all ranks; neighbours of up to ``small`` elements together are one piece."""
    sides: list[list[tuple[Interval, Exchange | None]]] = []
    for dim in range(2, len(shape)):
        axes = dim_axes(mesh, placements, dim)
        owned = owners(mesh, axes, shape[dim])
        sides.append([])
        of_one = math.prod(shape) // shape[dim]
        for interval in _joined([(a, b) for a, b in owned if b > a], small // of_one if of_one else 0):
            needs = (window(interval, shape[dim]),) * len(owned)
            sides[-1].append((interval, exchange(mesh, axes, dim, owned, needs) if axes else None))
    return tuple(
        MapPiece(tuple(interval for interval, _ in side), Exchanges([each for _, each in side if each is not None]))
        for side in itertools.product(*sides)
    )


@dataclass(frozen=True)
class Points:
    """Positions of points in the map, in elements: (N, points, dims), dims in the grid's order, the last one first."""

    at: Tensor
    slope: Tensor  # The derivative of a position by the grid's coordinate.
    nearest: bool

    def reading(self, box: Sequence[Interval], space: Sequence[int]) -> Tensor | None:
        """The points that read an element of a piece of a map in one of the samples, as indices; none for all.

        A point reads the elements on both sides of it, one that is no number all elements. On a GPU all points are
        taken: it would wait for their number.
        """
        cut = [k for k, interval in enumerate(reversed(box)) if interval != (0, space[-1 - k])]
        if not cut or self.at.device.type != "cpu" or has_no_numbers(self.at):
            return None
        outside = torch.zeros((), dtype=torch.bool)
        for k in cut:
            start, stop = box[-1 - k]
            outside = outside | (self.at[..., k] < start - 1) | (self.at[..., k] >= stop)
        index = (~outside).any(0).nonzero().squeeze(1)
        return index if len(index) <= MOST_SELECTED * self.at.shape[1] else None

    def selected(self, index: Tensor | None) -> Points:
        """The points of such indices."""
        return self if index is None else replace(self, at=self.at[:, index])

    def grid(self, box: Sequence[Interval]) -> Tensor:
        """The grid for torch's kernel of a piece of the map: padded by zeros, it gives its share of each point.

        The kernel rounds the positions that it makes of coordinates. None may pass an element by that, as gradients by
        positions jump there.
        """
        start, extent = (
            torch.tensor(sizes[::-1], device=self.at.device, dtype=self.at.dtype)
            for sizes in ([a for a, _ in box], [b - a for a, b in box])
        )
        if self.nearest:
            at = self.at.round() - start
        else:
            low, least = self.at.floor(), ROUNDED * torch.finfo(self.at.dtype).eps * extent
            at = (low - start) + (self.at - low).clamp(least, 1 - least)
        samples, count, dims = at.shape
        return ((2 * at + 1) / extent - 1).view(samples, *(1,) * (dims - 1), count, dims)


@dataclass(frozen=True)
class Sampling:
    """The decisions of an operator for this rank's parts of a map and of a grid."""

    pieces: tuple[MapPiece, ...]
    space: torch.Size
    options: tuple[int, int, bool]  # Mode, padding and whether corners align, as the operator has them.

    def points(self, grid: Tensor, dtype: torch.dtype, *, forward: bool) -> Points:
        """The points of a grid (N, ..., dims) in the map; those outside go where torch puts them.

        So do those that are no number: torch's kernels clip them to the first element, that of volumes on a processor
        to the last. Backward of the latter and of a GPU's leaves them out.
        """
        mode, padding, align = self.options
        coordinates = grid.to(dtype).flatten(1, -2)
        size = torch.tensor(list(self.space)[::-1], device=grid.device, dtype=dtype)
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
            slope = torch.where((at > 0) & (at < size - 1), slope, 0)
            at = torch.minimum(at.clamp(min=0), size - 1)
            of_processor, of_volume = at.device.type == "cpu", len(self.space) == 3
            if forward or (of_processor and not of_volume):
                at = torch.where(at.isnan(), size - 1 if of_processor and of_volume else 0, at)
        elif forward and len(self.space) == 2:
            at = at + (at * 0).sum(-1, keepdim=True)  # What is interpolated at an infinite coordinate is no number.
        return Points(at, slope, mode == NEAREST)


class _Sampled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Tensor, work: Sampling) -> Tensor:
        ctx.save_for_backward(x, grid)
        ctx.work = work
        dtype, (samples, channels) = precise(x.dtype), x.shape[:2]
        kernel = getattr(aten, f"grid_sampler_{len(work.space)}d")
        at = work.points(grid, dtype, forward=True)
        result = torch.zeros(samples, channels, at.at.shape[1], dtype=dtype, device=x.device)
        for piece in work.pieces:
            values, index = piece.transfer.fetch(x).to(dtype), at.reading(piece.box, work.space)
            of_piece = at.selected(index).grid(piece.box)
            found = kernel(values, of_piece, int(at.nearest), ZEROS, False).view(samples, channels, of_piece.shape[-2])
            if index is None:
                result += found
            else:
                result.index_add_(2, index, found)
        return result.view(samples, channels, *grid.shape[1:-1]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, grid = ctx.saved_tensors
        work, dtype = ctx.work, precise(x.dtype)
        derivative = getattr(aten, f"grid_sampler_{len(work.space)}d_backward")
        at = work.points(grid, dtype, forward=False)
        grad = grad.to(dtype).reshape(*x.shape[:2], *(1,) * (len(work.space) - 1), at.at.shape[1])
        dx = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        by_position = torch.zeros_like(at.at)
        for piece in work.pieces:
            values, index = piece.transfer.fetch(x).to(dtype), at.reading(piece.box, work.space)
            of_piece, of_points = at.selected(index).grid(piece.box), grad if index is None else grad[..., index]
            both = derivative(of_points, values, of_piece, int(at.nearest), ZEROS, False, [True, True])
            dx += piece.transfer.adjoint(both[0])
            by_piece = both[1].view(len(x), of_piece.shape[-2], len(work.space))
            for k, (a, b) in enumerate(reversed(piece.box)):
                found, of_dim = by_piece[..., k] * (2 / (b - a)), by_position[..., k]
                if index is None:
                    of_dim += found
                else:
                    of_dim.index_add_(1, index, found)
        return dx.to(x.dtype), (by_position * at.slope).view(grid.shape).to(grid.dtype), None


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
        result = func(as_own_part(x, mesh, replicated(mesh)), as_own_part(grid, mesh, replicated(mesh)), *options)
        return wrapped(result, mesh, replicated(mesh), result.shape)
    if grid.shape[0] != x.shape[0] or grid.dim() != x.dim() or grid.shape[-1] != x.dim() - 2:
        raise RuntimeError(f"{func}: an input {tuple(x.shape)} with a grid {tuple(grid.shape)}")
    layouts = placements_on(x, mesh), placements_on(grid, mesh)
    of_x, of_grid, of_result = sampling_layouts(mesh, *layouts, x.shape[0], x.dim() - 2)
    work = Sampling(_pieces(mesh, of_x, tuple(x.shape), whole.MOST_BYTES // x.element_size()), x.shape[2:], options)
    # Ranks sample the same elements at different points, and different channels at the same points.
    repeated = [a for a, (p, q) in enumerate(zip(of_x, of_result, strict=True)) if p.is_replicate() and q.is_shard()]
    of_channels = [axis for axis, placement in enumerate(of_x) if placement == Shard(1)]
    own_x, own_grid = as_own_part(x, mesh, of_x, repeated), as_own_part(grid, mesh, of_grid, of_channels)
    result = apply(_Sampled, own_x, own_grid, work)
    return wrapped(result, mesh, of_result, (*x.shape[:2], *grid.shape[1:-1]))
