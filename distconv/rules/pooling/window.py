"""Window pools: maximum and average.

A pool fetches the inputs that its outputs read, as a convolution does. Its backward adds the gradients of fetched
inputs back to their owners. If one window is the whole input, an adaptive pool to extent 1 replaces it, which moves
less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from distconv.rules.operands.sums import lowest
from distconv.rules.pooling.operator import (
    adaptive,
    cut_as_gradient,
    forward_of,
    moved_positions,
    shaped_like,
    spatial_dims,
)
from distconv.rules.registry import rule
from distconv.rules.schemas import named_arguments
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import Layout, coordinate, input_layout, local_shape, owners, shard_axes
from distconv.transfer.exchange import Exchanges, exchange
from distconv.transfer.local_part import local_as
from distconv.transfer.needs import window
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Window, length


@dataclass(frozen=True)
class WindowPlan:
    """A window pool of these shapes on this mesh, on this rank."""

    exchanges: Exchanges  # Fetches the inputs that this rank's outputs read; those beyond the edge have a fill value.
    wide: tuple[int, ...]  # Local shape of the input after the exchanges.
    arguments: list[Any]
    """Of the local call: kernel, stride, the padding that is left to it, and the others, up to an average's divisor."""
    starts: tuple[int, ...]  # Per spatial dim, where in the whole input the fetched one begins.
    filled: bool  # Whether some of what is fetched is outside the input.
    out_shape: tuple[int, ...]
    out_local: tuple[int, ...]
    single: bool  # One window is the whole input: an adaptive pool to extent 1, which moves partial results only.
    counts: tuple[tuple[int, ...], ...]
    """Per spatial dim, by how many elements an average divides, for each output that this rank owns."""
    divisor: int | None  # The number by which an average divides instead, if the program gives one.

    @property
    def empty(self) -> bool:
        """This rank owns no output."""
        return 0 in self.out_local


@planned(4096)
def make_window_plan(
    func: Any,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    **options: Any,
) -> WindowPlan:
    """Checks the arguments as one process would, on the whole shapes, and derives the plan.

    ``options``: the operator's other arguments by name, with tuples.
    """
    is_average = "avg" in func._schema.name
    result = func(torch.empty(shape, dtype=dtype, device="meta"), **options)
    out_shape = tuple((result if is_average else result[0]).shape)
    spatial = spatial_dims(func)
    divisor, dilations = options.get("divisor_override"), options.get("dilation", (1,))
    given, padding, dilation = (
        _expanded(each, spatial) for each in (options["kernel_size"], options["padding"], dilations)
    )
    stride = _expanded(options["stride"], spatial) or given
    kernel = tuple(map(_reaching, given, shape[-spatial:], padding, dilation, out_shape[-spatial:]))
    axes = shard_axes(mesh, placements, first=len(shape) - spatial)
    local_padding, starts = list(padding), [0] * spatial
    wide, filled, exchanges, counts = list(local_shape(mesh, placements, shape)), False, [], []
    for at in range(spatial):
        dim = len(shape) - spatial + at
        geometry, extent = Window(kernel[at], stride[at], padding[at], dilation[at]), shape[dim]
        outputs = (0, out_shape[dim])
        if dim in axes:
            rank, owned = coordinate(mesh, axes[dim]), owners(mesh, axes[dim], out_shape[dim])
            outputs, spans = owned[rank], [geometry.inputs(interval) for interval in owned]
            needs = tuple(window(span, extent) for span in spans)
            exchanges.append(exchange(mesh, axes[dim], dim, owners(mesh, axes[dim], extent), needs))
            wide[dim], starts[at], local_padding[at] = length(spans[rank]), spans[rank][0], 0
            filled = filled or spans[rank][0] < 0 or spans[rank][1] > extent
        if is_average:
            wanted, padded = Window(given[at], stride[at], padding[at], dilation[at]), options["count_include_pad"]
            counts.append(tuple(_count(wanted, output, extent, padded) for output in range(*outputs)))
    whole = divisor is None and kernel == shape[-spatial:] and not any(padding) and set(dilation) == {1}
    return WindowPlan(
        Exchanges(exchanges),
        tuple(wide),
        [
            kernel,
            stride,
            local_padding,
            *((options["ceil_mode"], True) if is_average else (dilation, options["ceil_mode"])),
        ],
        tuple(starts),
        filled,
        out_shape,
        local_shape(mesh, placements, out_shape),
        bool(exchanges) and whole,
        tuple(counts),
        divisor,
    )


def _reaching(kernel: int, extent: int, padding: int, dilation: int, outputs: int) -> int:
    """The extent of a kernel; cut to the padded input if there is one window: ceil_mode lets it be far larger."""
    return min(kernel, (extent + 2 * padding - 1) // dilation + 1) if outputs == 1 else kernel


def _expanded(values: Sequence[int], spatial: int) -> tuple[int, ...]:
    return tuple(values) * spatial if len(values) == 1 else tuple(values)


def _count(geometry: Window, output: int, extent: int, include_padding: bool) -> int:
    start, stop = geometry.inputs((output, output + 1))
    stop = min(stop, extent + geometry.padding)
    return stop - start if include_padding else min(stop, extent) - max(start, 0)


def _planned(func: Any, x: DTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[WindowPlan, Layout]:
    """The plan of a pool with these arguments after x, and the layout of x."""
    mesh, placements = input_layout(func, x)
    given = named_arguments(func, (x, *args), kwargs)
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if name != "self"}
    plan = make_window_plan(func, mesh, tuple(placements), tuple(x.shape), x.dtype, **options)
    return plan, (mesh, placements)


@rule("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices")
def maximum(func: Any, x: DTensor, *args: Any, **kwargs: Any) -> tuple[DTensor, DTensor]:
    """y and, for each of its elements, the flat position in the whole spatial input where it was found."""
    plan, (mesh, placements) = _planned(func, x, args, kwargs)
    spatial = spatial_dims(func)
    if plan.single:
        return adaptive("max", spatial)(x, [1] * spatial)
    local = plan.exchanges.fetch(x._local_tensor, lowest(x.dtype, True))
    if plan.empty:
        y, index = local.new_empty(plan.out_local), local.new_empty(plan.out_local, dtype=torch.int64)
    else:
        y, index = func(local, *plan.arguments)
        index = moved_positions(index, plan.wide[-spatial:], plan.starts, x.shape[-spatial:], clamp=plan.filled)
    return wrap(y, mesh, placements, plan.out_shape), wrap(index, mesh, placements, plan.out_shape)


@rule("aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward")
def maximum_backward(func: Any, grad: Tensor, x: DTensor, *rest: Any) -> DTensor:
    """Every gradient goes to where the maximum was found."""
    *window, indices = rest
    spatial, x = spatial_dims(func), cut_as_gradient(x, grad)
    plan, (mesh, placements) = _planned(forward_of(func), x, window, {})
    if plan.single:
        return adaptive("max", spatial, "_backward")(grad, x, indices)
    local, index = local_as(grad, mesh, placements), local_as(indices, mesh, placements)
    if plan.empty:
        dx = local.new_zeros(plan.wide)
    else:
        index = moved_positions(index, x.shape[-spatial:], [-start for start in plan.starts], plan.wide[-spatial:])
        dx = func(local, shaped_like(x._local_tensor, plan.wide), *plan.arguments, index)
    return wrap(plan.exchanges.adjoint(dx), mesh, placements, x.shape)


def _divisor(plan: WindowPlan, like: Tensor) -> tuple[int, Tensor | None]:
    """(what the local average divides by, what is still to divide by)."""
    if plan.divisor is not None:
        return plan.divisor, None
    if all(len(set(counts)) <= 1 for counts in plan.counts):
        return math.prod(counts[0] for counts in plan.counts), None
    product = torch.ones((), dtype=like.dtype, device=like.device)
    for counts in plan.counts:
        product = product[..., None] * torch.tensor(counts, dtype=like.dtype, device=like.device)
    return 1, product


@rule("aten::avg_pool2d", "aten::avg_pool3d")
def average(func: Any, x: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """The sum of each window over the count that the whole input gives it."""
    plan, (mesh, placements) = _planned(func, x, args, kwargs)
    if plan.single:
        spatial = spatial_dims(func)
        return adaptive("avg", spatial)(x, [1] * spatial)
    local = plan.exchanges.fetch(x._local_tensor, 0)
    if plan.empty:
        return wrap(local.new_empty(plan.out_local), mesh, placements, plan.out_shape)
    divisor, remaining = _divisor(plan, local)
    y = func(local, *plan.arguments, divisor)
    return wrap(y if remaining is None else y.div_(remaining), mesh, placements, plan.out_shape)


@rule("aten::avg_pool2d_backward", "aten::avg_pool3d_backward")
def average_backward(func: Any, grad: Tensor, x: DTensor, *window: Any) -> DTensor:
    """Every gradient, over its window's count, goes to all elements of the window."""
    x = cut_as_gradient(x, grad)
    plan, (mesh, placements) = _planned(forward_of(func), x, window, {})
    if plan.single:
        return adaptive("avg", spatial_dims(func), "_backward")(grad, x)
    local = local_as(grad, mesh, placements)
    if plan.empty:
        dx = local.new_zeros(plan.wide)
    else:
        divisor, remaining = _divisor(plan, local)
        local = local if remaining is None else local / remaining
        dx = func(local, shaped_like(x._local_tensor, plan.wide), *plan.arguments, divisor)
    return wrap(plan.exchanges.adjoint(dx), mesh, placements, x.shape)
