"""Resizing by nearest, linear and cubic interpolation, antialiased or not, samples and space sharded.

Along each dim an interpolation is a table of taps (``taps``): which inputs an output reads, and with which weights. Its
transpose is the backward. Each rank fetches what its outputs (backward: its inputs) read, and applies the taps of a
sharded dim itself. One call of the stock operator serves the dims that a rank has whole, and sharded dims where a
shard's table is that of a stand-alone resize.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.rules.operands.sums import all_reduce, precise
from distconv.rules.registry import rule
from distconv.rules.resize.taps import Taps, antialiased_taps, linear_taps, nearest_taps
from distconv.rules.schemas import name_of, operator
from distconv.tensors.dtensors import memory_format, wrap
from distconv.tensors.layouts import added_up, coordinate, input_layout, layout_of, local_shape, owners, shard_axes
from distconv.tensors.mesh import is_ours
from distconv.tensors.mesh import placements as partition_placements
from distconv.tensors.refusal import refuse
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.local_part import local_as
from distconv.transfer.needs import window
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Interval, length

NEAREST = tuple(f"{name}{dims}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3))
LINEAR = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
ANTIALIASED = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")


@dataclass(frozen=True, eq=False)
class ResizedDim:
    """One direction of one sharded dim on this rank."""

    dim: int
    exchange: Exchange
    results: int
    index: Tensor
    weight: Tensor | None  # None where every weight is 1.
    stock: bool  # The stock operator applies the taps.

    def apply(self, local: Tensor) -> Tensor:
        """Fetch and interpolate along the dim; only fetch where the stock operator follows."""
        wide, dim = self.exchange.fetch(local), self.dim
        if self.stock:
            return wide
        shape = [*wide.shape[:dim], self.results, *wide.shape[dim + 1 :]]
        if 0 in shape or not wide.shape[dim]:
            return wide.new_zeros(shape)
        if self.weight is None:
            return wide.index_select(dim, self.index[0])
        dtype, column = wide.dtype, [-1, *[1] * (wide.dim() - dim - 1)]
        wide = wide.to(precise(dtype))
        result: Tensor | None = None
        for index, weight in zip(self.index, self.weight.to(wide.dtype), strict=True):
            part, by = wide.index_select(dim, index), weight.view(column)
            result = part.mul_(by) if result is None else result.addcmul_(part, by)
        assert result is not None
        return result.to(dtype)


@dataclass(frozen=True, eq=False)
class ResizePlan:
    """A resize of these shapes on this mesh, on this rank."""

    forward: tuple[ResizedDim, ...]
    backward: tuple[ResizedDim, ...]
    out_shape: tuple[int, ...]
    out_local: tuple[int, ...]
    in_local: tuple[int, ...]
    options: list[Any]
    """Arguments of the stock operator: whether corners align, for linear ones, and the scales of the whole dims."""
    stock: bool  # Whether the stock operator has work even where it keeps the shape.


@planned(4096)
def make_resize_plan(
    name: str,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    format: torch.memory_format,
    size: tuple[int, ...],
    options: tuple[Any, ...],
) -> ResizePlan:
    """Checks the arguments as one process would, on the whole shapes, and derives the plan."""
    func = operator(name)
    if not dtype.is_floating_point:
        raise refuse(func, f"its input is of {dtype}; accepted: floating point")
    axes = shard_axes(mesh, placements, first=2)
    # Torch's own check of shapes fails for a tensor without samples.
    like_one = torch.empty((max(shape[0], 1), *shape[1:]), dtype=dtype, device="meta")
    out_shape = (shape[0], *func(like_one, size, *options).shape[1:])
    align, given = (options[:1], options[1:]) if name not in NEAREST else ((), options)
    scales: list[float | None] = [*given, *[None] * (len(size) - len(given))]
    kept = () if any(align) else tuple(_kept(name, shape, out_shape, scales))
    for dim in kept:
        if mesh.device_type != "cpu" or ("cubic" in name and shape[2:] == out_shape[2:]):
            what = f"a scale of {scales[dim - 2]} that keeps dim {dim} at {shape[dim]}"
            raise refuse(func, f"{what}, where torch's forward and backward kernels differ; accepted: size=")
    like = torch.empty([2] * len(shape), dtype=dtype, device=mesh.device_type, memory_format=format)
    sides: tuple[list[ResizedDim], list[ResizedDim]] = ([], [])
    # For a shard one element wide torch's antialiased kernel repeats the first row, so taps resize all dims here.
    # Its bicubic kernel for gradients ignores the scale of a dim that keeps its size, if it resizes no other one.
    every = axes and (name in ANTIALIASED or ("cubic" in name and kept))
    own = range(2, len(shape)) if every else sorted(axes)
    for dim in own:
        along = _Along(name, dim - 2, any(align), scales[dim - 2], like, mesh, axes.get(dim, ()))
        inputs, outputs = (owners(mesh, along.axes, of[dim]) for of in (shape, out_shape))
        sides[0].append(along.side(inputs, outputs, backward=False))
        sides[1].append(along.side(outputs, inputs, backward=True))
        scales[along.at] = None
    in_local, out_local = local_shape(mesh, placements, shape), local_shape(mesh, placements, out_shape)
    stock = not axes or any(scale not in (None, 1) for scale in scales)
    return ResizePlan(tuple(sides[0]), tuple(sides[1]), out_shape, out_local, in_local, [*align, *scales], stock)


def _kept(name: str, shape: Sequence[int], out_shape: Sequence[int], scales: Sequence[float | None]) -> list[int]:
    """Dims that interpolation with a scale other than 1 leaves at their extent (a scale of 1.25, from 2 to 2)."""
    dims = range(2, len(shape)) if name in LINEAR else ()
    return [dim for dim in dims if scales[dim - 2] not in (None, 1) and shape[dim] == out_shape[dim]]


@dataclass(frozen=True)
class _Along:
    """An operator along one spatial dim, sharded along some axes, for the dtype, device and format of ``like``."""

    name: str
    at: int
    align_corners: bool
    scale: float | None
    like: Tensor
    mesh: DeviceMesh
    axes: tuple[int, ...]

    def taps(self, elements: int, results: int, scale: float | None, backward: bool) -> Taps:
        """The taps from elements to results: from inputs to outputs or, in backward, from outputs to inputs."""
        inputs, outputs = (results, elements) if backward else (elements, results)
        if self.name in NEAREST:
            taps = nearest_taps(self.name, self.at, inputs, outputs, scale, self.like, backward)
        elif self.name in ANTIALIASED:
            taps = antialiased_taps(self.name, self.at, inputs, outputs, scale, self.align_corners, self.like)
        else:
            taps = linear_taps(inputs, outputs, scale, self.align_corners, "cubic" in self.name, self.like.dtype)
        return taps.transposed(inputs) if backward else taps

    def side(self, elements: tuple[Interval, ...], results: tuple[Interval, ...], backward: bool) -> ResizedDim:
        """``elements`` and ``results``: what each rank owns of both."""
        dim, rank, count = self.at + 2, coordinate(self.mesh, self.axes), elements[-1][1]
        whole = self.taps(count, results[-1][1], self.scale, backward)
        spans = [whole.span(interval) for interval in results]
        which = exchange(self.mesh, self.axes, dim, elements, tuple(window(span, count) for span in spans))
        part = whole.part(results[rank], spans[rank][0])
        read, own = length(spans[rank]), length(results[rank])
        stock = self.name in NEAREST and read > 0 and own > 0 and part.equals(self.taps(read, own, None, backward))
        tables = (np.ascontiguousarray(table) for table in (part.index, part.weight))
        index, weight = (torch.from_numpy(table).to(self.mesh.device_type) for table in tables)
        return ResizedDim(dim, which, own, index, None if part.selects else weight, stock)


def _single(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int]) -> tuple[Placement, ...]:
    """``placements``, but with dims of extent 1 sharded by the spatial axes that would shard them.

    Such a dim, pooled to 1, is replicated; resized it is to be combined with sharded tensors again.
    """
    canonical = partition_placements(mesh, len(shape))
    return tuple(
        wanted
        if placement.is_replicate() and isinstance(wanted, Shard) and wanted.dim > 1 and shape[wanted.dim] == 1
        else placement
        for placement, wanted in zip(placements, canonical, strict=True)
    )


@rule(*(f"aten::{name}" for name in (*NEAREST, *LINEAR, *ANTIALIASED)))
def resize(func: Any, x: DTensor, size: Sequence[int], *options: Any) -> DTensor:
    """y (N, C, size...) from x (N, C, spatial...), sharded as x is; a replicated dim of extent 1 becomes sharded."""
    mesh, placements = input_layout(func, x)
    single = _single(mesh, placements, x.shape) if 1 in x.shape[2:] and is_ours(mesh) else placements
    if single != placements:
        x, placements = wrap(local_as(x, mesh, single), mesh, single, x.shape), single
    name, form = name_of(func), memory_format(x)
    plan = make_resize_plan(name, mesh, placements, tuple(x.shape), x.dtype, form, tuple(size), options)
    local = x._local_tensor
    for side in plan.forward:
        local = side.apply(local)
    if 0 in plan.out_local:
        local = local.new_empty(plan.out_local)
    elif local.shape != plan.out_local or plan.stock:
        local = func(local, plan.out_local[2:], *plan.options)
    elif local is x._local_tensor:
        local = local.clone()
    return wrap(local.contiguous(memory_format=form), mesh, placements, plan.out_shape)


@rule(*(f"aten::{name}_backward" for name in (*NEAREST, *LINEAR, *ANTIALIASED)))
def resize_backward(func: Any, grad: DTensor, size: Sequence[int], shape: Sequence[int], *options: Any) -> DTensor:
    """The transposed interpolation; replicated along the axes of dims of extent 1, which may have been so."""
    mesh, placements = layout_of(grad)
    placements = added_up(placements)
    name, form = name_of(func).removesuffix("_backward"), memory_format(grad)
    plan = make_resize_plan(name, mesh, placements, tuple(shape), grad.dtype, form, tuple(size), options)
    local = start = local_as(grad, mesh, placements)
    for side in plan.backward:
        local = side.apply(local)
    if 0 in plan.in_local or 0 in local.shape:
        local = local.new_zeros(plan.in_local)
    elif local.shape != plan.in_local or plan.stock:
        local = func(local, local.shape[2:], plan.in_local, *plan.options)
    elif local is start:
        local = local.clone()
    after, axes = list(placements), list[int]()
    for dim, along in shard_axes(mesh, placements, first=2).items():
        if shape[dim] == 1:
            after = [Replicate() if axis in along else of for axis, of in enumerate(after)]
            axes += along
            if not local.shape[dim]:
                local = local.new_zeros([*local.shape[:dim], 1, *local.shape[dim + 1 :]])
    if axes:
        local = all_reduce(local, mesh, sorted(axes))
    return wrap(local.contiguous(memory_format=form), mesh, after, shape)


@rule(*(f"aten::{name}.vec" for name in (*NEAREST, *LINEAR, *ANTIALIASED)))
def from_factors(func: Any, x: DTensor, size: Sequence[int] | None, *rest: Any) -> Any:
    """The rule in inference mode, where the operator arrives before torch has computed its output size.

    Torch would take it apart into indexing instead of the operator that has a rule.
    """
    *align, factors = rest
    space = x.shape[2:]
    if size is None:
        size = [int(extent * factor) for extent, factor in zip(space, factors, strict=True)]
    return operator(name_of(func))(x, size, *align, *(factors or [None] * len(space)))
