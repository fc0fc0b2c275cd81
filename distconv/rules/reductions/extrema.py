"""Positions of the largest or smallest elements: argmax, argmin, max and min along a dim, and topk; quantiles.

Each rank finds its own candidates. One gather of these, as many as the result has elements, decides. Of equal elements
the first counts. Which of equal ones topk takes depends on all of a row, so it moves shards to other dims, or gathers
rows that are small. Of large ones it takes any.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from distconv.rules import whole
from distconv.rules.operands.layouts import layout_beside
from distconv.rules.operands.sums import lowest, settled
from distconv.rules.reductions import Reduction
from distconv.rules.registry import above_autograd, rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import dim_axes, local_box, owners
from distconv.transfer.collectives import all_gathered
from distconv.transfer.exchange import exchange
from distconv.transfer.group import joint_group
from distconv.transfer.needs import window
from distconv.transfer.redistribution import redistributed_data


def _first_best(values: Tensor, places: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    """Along dim 0, the best value at the smallest place."""
    best = values.amax(0) if largest else values.amin(0)
    wins = (values == best) | values.isnan()  # where there is one, it is the best
    return best, torch.where(wins, places, torch.iinfo(torch.int64).max).amin(0)


def _gathered(local: Tensor, group: Any, ranks: int) -> Tensor:
    """(ranks, ...) of every rank's tensor."""
    return all_gathered(local.reshape(-1), ranks, group).view(ranks, *local.shape)


def _located(func: Any, x: DTensor, dim: int | None, keepdim: bool, largest: bool) -> tuple[DTensor, DTensor]:
    """(extreme values, their places along dim, or in the flat tensor where dim is None)."""
    work = Reduction(func, x, dim, keepdim)
    local, mesh, dims = work.local, work.mesh, work.dims
    if not work.count:
        raise IndexError(f"{func}: a tensor {tuple(x.shape)} has no extreme element")
    box = local_box(mesh, work.placements, x.shape)
    places = torch.zeros((), dtype=torch.int64, device=local.device)
    for d in dims:
        places = places.unsqueeze(-1) * x.shape[d] + torch.arange(*box[d], device=local.device)
    rest = [d for d in range(x.dim()) if d not in dims]
    flat = local.permute(*dims, *rest).reshape(places.numel(), *(local.shape[d] for d in rest))
    places = places.reshape(-1, *[1] * len(rest)).expand_as(flat)
    if flat.shape[0]:
        value, place = _first_best(flat, places, largest)
    else:
        value = flat.new_full(flat.shape[1:], lowest(flat.dtype, largest))
        place = torch.full(flat.shape[1:], torch.iinfo(torch.int64).max, device=flat.device)
    axes = tuple(axis for axis in work.axes if mesh.size(axis) > 1)
    if axes:
        group, ranks = joint_group(mesh, axes), math.prod(mesh.size(axis) for axis in axes)
        value, place = _first_best(_gathered(value, group, ranks), _gathered(place, group, ranks), largest)
    kept = [1 if d in dims else local.shape[d] for d in range(x.dim())]
    return work.wrap(value.reshape(kept)), work.wrap(place.reshape(kept))


@rule("aten::max.dim", "aten::min.dim")
def extremum_along(func: Any, x: DTensor, dim: int, keepdim: bool = False) -> tuple[DTensor, DTensor]:
    """The extreme values along dim and where they are."""
    return _located(func, x, dim, keepdim, func._schema.name.endswith("max"))


@rule("aten::argmax", "aten::argmin")
def place_of_extremum(func: Any, x: DTensor, dim: int | None = None, keepdim: bool = False) -> DTensor:
    """The position of the extreme value, along dim or in the flat tensor."""
    return _located(func, x, dim, keepdim, func._schema.name.endswith("max"))[1]


@rule("aten::topk")
def topk(
    func: Any, x: DTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[DTensor, DTensor]:
    """The k largest or smallest elements along dim and where they are, on every rank; of equal ones those that one
    process takes, but any where only large whole rows would tell."""
    local, (mesh, placements) = settled(func, x)
    dim %= max(x.dim(), 1)
    if not 0 <= k <= (x.shape[dim] if x.dim() else 1):
        raise RuntimeError(f"topk of {k} elements along dim {dim} of a tensor {tuple(x.shape)}")
    axes = dim_axes(mesh, placements, dim)
    shape = (*x.shape[:dim], k, *x.shape[dim + 1 :])
    if not axes:
        values, places = func(local, k, dim, largest, sorted)
        return wrap(values, mesh, placements, shape), wrap(places, mesh, placements, shape)
    after = tuple(Replicate() if axis in axes else placement for axis, placement in enumerate(placements))
    rows = layout_beside(mesh, placements, tuple(x.shape), frozenset([dim]))
    if rows is None and x.numel() * x.element_size() <= whole.MOST_BYTES:
        rows = after
    if rows is not None:
        own = redistributed_data(wrap(local, mesh, placements, x.shape), mesh, rows)._local_tensor
        values, places = (wrap(y, mesh, rows, shape) for y in func(own, k, dim, largest, sorted))
        return redistributed_data(values, mesh, after), redistributed_data(places, mesh, after)
    first, last = local_box(mesh, placements, x.shape)[dim]
    values, places = func(local, min(k, last - first), dim, largest, False)
    owned = owners(mesh, axes, x.shape[dim])
    ends = list(itertools.accumulate((min(k, stop - start) for start, stop in owned), initial=0))
    candidates = exchange(
        mesh, axes, dim, tuple(itertools.pairwise(ends)), (window((0, ends[-1]), ends[-1]),) * len(owned)
    )
    values, which = func(candidates.fetch(values), k, dim, largest, sorted)
    places = candidates.fetch(places + first).gather(dim, which)
    return wrap(values, mesh, after, shape), wrap(places, mesh, after, shape)


@above_autograd("aten::quantile.scalar")
def quantile(
    x: Tensor, q: float, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Any:
    """The quantile along a dim, of sorted elements; NaN where there is one, as in one process.

    Torch writes its results in place, here to what may be a copy.

    One between two elements is interpolated linearly, by a weight that is rounded to the type of x.
    """
    if dim is None or not x.numel() or not 0 <= q <= 1:
        return NotImplemented
    if interpolation != "linear" or x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    extent, ordered = x.shape[dim], x.sort(dim).values
    rank = float(torch.tensor(q, dtype=x.dtype) * (extent - 1))
    low, high, last = (ordered.narrow(dim, at, 1) for at in (math.floor(rank), math.ceil(rank), extent - 1))
    found = torch.lerp(low, high, rank - math.floor(rank))
    found = torch.where(last.isnan(), last, found)
    return found if keepdim else found.squeeze(dim)
