"""Linear layers of (samples, features) and (samples, positions..., features): a rank multiplies the rows that it owns.

With sharded features they are a convolution over one position (`distconv.settings.channels`), of all rows of a rank at
once. Features that a flatten has left sharded along space as well are one more split of x. Then y of (samples,
features) is sharded along the channel axes alone and replicated along the others, like all activations without space;
y of more dims is sharded as x is. Along an axis that shards positions, a sharded weight is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from distconv.rules.operands.channel_split import channel_layout, make_split
from distconv.rules.operands.own_parts import Apart, apply, as_own_part, carried, wrapped
from distconv.rules.products.batches import Product
from distconv.rules.registry import above_autograd
from distconv.settings.channels import ChannelMap
from distconv.settings.partition import shards_channels
from distconv.tensors.autograd_nodes import PARAMETER_VIEWS
from distconv.tensors.layouts import coordinate, dim_axes, find_layout, input_layout, owners, placements_on, replicated
from distconv.tensors.mesh import axis_names, channel_algorithm, splits_channels
from distconv.transfer.exchange import Exchange, Exchanges, exchange
from distconv.transfer.needs import window
from distconv.transfer.redistribution import redistributed, redistributed_data
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Interval

aten = torch.ops.aten


@planned(1024)
def _spread(mesh: DeviceMesh, axes: tuple[int, ...], inner: tuple[int, ...], filters: int) -> tuple[Exchange, Interval]:
    """From the part of y that this rank adds up to its local y, more along the inner axes; where that part is in it."""
    outer = [axis for axis in axes if axis not in inner]
    start, stop = owners(mesh, outer, filters)[coordinate(mesh, outer)]
    within = owners(mesh, inner, stop - start)
    owned = tuple((start + a, start + b) for a, b in within)
    needs = (window((start, stop), filters),) * len(owned)
    return exchange(mesh, inner, 1, owned, needs), within[coordinate(mesh, inner)]


class _Spread(torch.autograd.Function):
    """A rank's local y, from the part that it adds up; its gradient is that of this part."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, mesh: DeviceMesh, inner: tuple[int, ...], spread: Exchange, part: Interval
    ) -> Tensor:
        ctx.along, ctx.part = (mesh, inner), part
        y = spread.fetch(own)
        return y[...] if y is own else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return apply(Apart, grad, *ctx.along)[:, slice(*ctx.part)], None, None, None, None


def _of_shares(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y = x weight^T + bias for x (samples..., features), each rank with its block of the weight, of x in rows."""
    mesh, placements = input_layout(aten.linear.default, x, weight, bias)
    if x.shape[-1] != weight.shape[1]:
        raise RuntimeError(f"linear layer of an input {tuple(x.shape)} with a weight {tuple(weight.shape)}")
    last, names, filters = x.dim() - 1, axis_names(mesh), weight.shape[0]
    flat = channel_layout(mesh, tuple(Shard(int(p.dim == last)) if isinstance(p, Shard) else p for p in placements))
    # The axes that shard the features of x, and replicate y.
    inner = tuple(axis for axis in dim_axes(mesh, flat, 1) if last == 1 and not shards_channels(names[axis]))
    layer, algorithm = ChannelMap(weight.shape[1], filters), channel_algorithm(mesh)
    split = make_split(mesh, flat, layer, placements_on(weight, mesh), inner, algorithm)
    after = tuple(Replicate() if axis in inner else placement for axis, placement in enumerate(flat))
    of_x, of_y = (
        [Shard(last) if of == Shard(1) else p if of == Shard(0) else of for p, of in zip(placements, way, strict=True)]
        for way in (flat, after)
    )
    samples = tuple(axis for axis, p in enumerate(flat) if p == Shard(0))
    own, block = as_own_part(x, mesh, of_x), as_own_part(weight, mesh, split.weight, samples)
    block = block if block.numel() else block[:0, :0]  # nothing of it where it has no features or no filters
    rows = own.reshape(math.prod(own.shape[:-1]), own.shape[-1])
    y = carried(apply(Product, rows, block.t(), split.channels, Exchanges([])), split.filters, back=True)
    y = apply(_Spread, y, mesh, inner, *_spread(mesh, split.axes, inner, filters))
    if bias is not None:
        of_bias = [Shard(0) if p == Shard(1) else Replicate() for p in after]
        y = y + as_own_part(bias, mesh, of_bias, samples)
    return wrapped(y.view(*own.shape[:-1], y.shape[1]), mesh, of_y, (*x.shape[:-1], filters))


@PARAMETER_VIEWS
class GatheredParameter(torch.autograd.Function):
    """A sharded parameter, gathered along some axes; its gradient goes back to the shards."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, axes: tuple[int, ...]) -> DTensor:
        ctx.layout = parameter.device_mesh, parameter.placements
        mesh = parameter.device_mesh
        return redistributed_data(
            parameter, mesh, [Replicate() if a in axes else p for a, p in enumerate(parameter.placements)]
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        mesh, layout = ctx.layout
        if torch.is_grad_enabled():
            return redistributed(grad, mesh, layout), None
        keep = [
            p if p.is_partial() and not of.is_shard() else of for p, of in zip(grad.placements, layout, strict=True)
        ]
        if any(p != to and not p.is_replicate() for p, to in zip(grad.placements, keep, strict=True)):
            return redistributed_data(grad, mesh, layout), None
        return grad.redistribute(mesh, keep), None


def _whole(tensor: Any, axes: Sequence[int]) -> Any:
    """A parameter, gathered along those of the axes that shard it."""
    sharded = isinstance(tensor, DTensor) and any(tensor.placements[axis].is_shard() for axis in axes)
    return apply(GatheredParameter, tensor, tuple(axes)) if sharded else tensor


@above_autograd("aten::linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``aten::linear`` of DTensors or plain tensors. Differentiable."""
    mesh, placements = input_layout(aten.linear.default, x, weight, bias) if x.dim() else find_layout(x, weight, bias)
    last = x.dim() - 1
    every = range(mesh.ndim)
    if last < 1 or weight.dim() != 2:
        return aten.linear.default.decompose(x, _whole(weight, every), _whole(bias, every))
    names = axis_names(mesh)
    if last == 1:
        if not splits_channels(mesh):
            return aten.linear.default.decompose(x, _whole(weight, every), _whole(bias, every))
        channels = [axis for axis in every if shards_channels(names[axis]) and placements[axis] == Shard(0)]
        if channels and isinstance(x, DTensor):  # positions of all samples in one dim
            x = redistributed(x, mesh, [Shard(1) if axis in channels else p for axis, p in enumerate(placements)])
        return _of_shares(x, weight, bias)
    positions = [axis for axis in every if isinstance(placements[axis], Shard) and placements[axis] != Shard(last)]
    weight, bias = _whole(weight, positions), _whole(bias, positions)
    by_channels = channel_layout(
        mesh, tuple(Shard(int(p == Shard(last))) if isinstance(p, Shard) else p for p in placements)
    )
    if dim_axes(mesh, by_channels, 1):
        return _of_shares(x, weight, bias)
    own: Any = [None if p is None else as_own_part(p, mesh, replicated(mesh), positions) for p in (weight, bias)]
    y = functional.linear(as_own_part(x, mesh, placements), *own)
    return wrapped(y, mesh, placements, (*x.shape[:-1], weight.shape[0]))
