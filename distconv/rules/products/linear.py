"""Linear layers of (samples, features) and (samples, positions..., features): a rank multiplies the rows that it owns.

With sharded features they are a convolution over one position (`distconv.settings.channels`), of all rows of a rank at
once. Features that a flatten has left sharded along space as well are one more split of x. Then y of (samples,
features) is sharded along the channel axes alone and replicated along the others, like all activations without space;
y of more dims is sharded as x is. Along an axis that shards positions, a sharded weight is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from distconv.rules.operands.channel_split import Split, channel_layout, split
from distconv.rules.operands.own_parts import Added, brought, carried, wrapped
from distconv.rules.registry import above_autograd, rule
from distconv.settings.channels import ChannelMap
from distconv.settings.partition import shards_channels
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import coordinate, dim_axes, find_layout, input_layout, owners, replicated
from distconv.tensors.mesh import splits_channels
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.local_part import local_as
from distconv.transfer.needs import window
from distconv.transfer.redistribution import moved, relaid
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Interval

aten = torch.ops.aten


@dataclass(frozen=True)
class LinearPlan:
    """The layouts of the tensors of one linear layer, x and y as matrices of rows and features."""

    mesh: DeviceMesh
    x: tuple[Placement, ...]
    y: tuple[Placement, ...]
    shards: tuple[tuple[Placement, ...], tuple[Placement, ...]]
    """Of x and of y with all their dims."""
    split: Split
    spread: Exchange
    """From the part of y that this rank adds up to what it holds: more, along the axes that replicate y."""
    part: Interval
    """The interval of that part in what the rank holds."""

    def block_of(self, weight: Tensor) -> Tensor:
        """This rank's block of the weight; nothing of it where it has no features or no filters."""
        own = local_as(weight, self.mesh, self.split.weight)
        return own if own.numel() else own[:0, :0]

    def vector(self) -> list[Placement]:
        """Of the bias."""
        return [Shard(0) if placement == Shard(1) else Replicate() for placement in self.y]

    def summed(self, held: list[Placement] | tuple[Placement, ...]) -> list[Placement]:
        """Of the gradient of a parameter that is held so: a partial sum over the samples."""
        return [Partial() if p == Shard(0) else of for p, of in zip(self.x, held, strict=True)]


def linear_plan(x: Tensor, weight: Tensor, *others: Any) -> LinearPlan:
    """Of x (..., features) and weight (filters, features)."""
    mesh, placements = input_layout(aten.linear.default, x, weight, *others)
    last = x.dim() - 1
    flat = tuple(Shard(int(p.dim == last)) if isinstance(p, Shard) else p for p in placements)
    flat = channel_layout(mesh, flat)
    names = mesh.mesh_dim_names or ()
    inner: tuple[int, ...] = ()
    if last == 1:
        inner = tuple(axis for axis in dim_axes(mesh, flat, 1) if not shards_channels(names[axis]))
    parts = split(aten.linear.default, mesh, flat, ChannelMap(weight.shape[1], weight.shape[0]), weight, inner)
    after = tuple(Replicate() if axis in inner else placement for axis, placement in enumerate(flat))
    shards = [
        tuple(
            Shard(last) if of == Shard(1) else p if of == Shard(0) else of
            for p, of in zip(placements, way, strict=True)
        )
        for way in (flat, after)
    ]
    return LinearPlan(
        mesh, flat, after, (shards[0], shards[1]), parts, *_spread(mesh, parts.axes, inner, weight.shape[0])
    )


@planned(1024)
def _spread(mesh: DeviceMesh, axes: tuple[int, ...], inner: tuple[int, ...], filters: int) -> tuple[Exchange, Interval]:
    outer = [axis for axis in axes if axis not in inner]
    start, stop = owners(mesh, outer, filters)[coordinate(mesh, outer)]
    within = owners(mesh, inner, stop - start)
    owned = tuple((start + a, start + b) for a, b in within)
    needs = (window((start, stop), filters),) * len(owned)
    return exchange(mesh, inner, 1, owned, needs), within[coordinate(mesh, inner)]


class Linear(torch.autograd.Function):
    """y = x weight^T + bias for x (samples, features), all on one mesh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> DTensor:
        at = linear_plan(x, weight, bias)
        if x.shape[-1] != weight.shape[1]:
            raise RuntimeError(f"linear layer of an input {tuple(x.shape)} with a weight {tuple(weight.shape)}")
        ctx.save_for_backward(x, weight)
        own = local_as(x, at.mesh, at.shards[0])
        y = at.split.filters.adjoint(at.split.channels.fetch(_rows(own)) @ at.block_of(weight).t())
        y = at.spread.fetch(y)
        if bias is not None:
            y = y + local_as(bias, at.mesh, at.vector())
        y = y.view(*own.shape[:-1], y.shape[1])
        return wrap(y, at.mesh, at.shards[1], (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
        x, weight = ctx.saved_tensors
        at = linear_plan(x, weight, grad)
        if torch.is_grad_enabled():
            return _differentiably(at, grad, x, weight, ctx.needs_input_grad)
        own = _rows(_laid_out(grad, at.mesh, at.shards[1]))
        for_x, for_weight, for_bias = ctx.needs_input_grad
        dx = dw = db = None
        if for_x or for_weight:
            wide = at.split.filters.fetch(own[:, slice(*at.part)])
        own_x = local_as(x, at.mesh, at.shards[0])
        if for_x:
            local = at.split.channels.adjoint(wide @ at.block_of(weight))
            dx = wrap(local.view(own_x.shape), at.mesh, at.shards[0], x.shape)
        if for_weight:
            local = wide.t() @ at.split.channels.fetch(_rows(own_x))
            local = local.reshape(local_as(weight, at.mesh, at.split.weight).shape)
            dw = wrap(local, at.mesh, at.summed(at.split.weight), weight.shape)
        if for_bias:
            db = wrap(own.sum(0), at.mesh, at.summed(at.vector()), weight.shape[:1])
        return dx, dw, db


def _differentiably(
    at: LinearPlan, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """The gradients of x, the weight and the bias, recorded by autograd: for gradients of gradients."""
    mesh, (for_x, for_weight, for_bias) = at.mesh, mask
    samples = tuple(axis for axis, placement in enumerate(at.x) if placement == Shard(0))
    inner = tuple(axis for axis, (a, b) in enumerate(zip(at.x, at.y, strict=True)) if a == Shard(1) and b != a)
    wide = carried(_rows(brought(grad, mesh, at.shards[1], inner))[:, slice(*at.part)], at.split.filters)
    own_x, own = brought(x, mesh, at.shards[0]), brought(weight, mesh, at.split.weight, samples)
    dx = dw = db = None
    if for_x:
        local = carried(wide @ (own if own.numel() else own[:0, :0]), at.split.channels, back=True)
        dx = wrapped(local.view(own_x.shape), mesh, at.shards[0], x.shape)
    if for_weight:
        local = (wide.t() @ carried(_rows(own_x), at.split.channels)).reshape(own.shape)
        dw = wrapped(Added.apply(local, mesh, samples), mesh, at.split.weight, weight.shape)
    if for_bias:
        local = _rows(brought(grad, mesh, at.shards[1])).sum(0)
        db = wrapped(Added.apply(local, mesh, samples), mesh, at.vector(), weight.shape[:1])
    return dx, dw, db


def _rows(local: Tensor) -> Tensor:
    return local.reshape(math.prod(local.shape[:-1]), local.shape[-1])


def _laid_out(grad: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """This rank's part of a gradient, which may lie otherwise than what it is of."""
    if isinstance(grad, DTensor) and grad.device_mesh == mesh:
        return moved(grad, mesh, placements)._local_tensor
    return local_as(grad, mesh, placements)


class Whole(torch.autograd.Function):
    """A sharded parameter, gathered along some axes; its gradient goes back to the shards."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, axes: tuple[int, ...]) -> DTensor:
        ctx.layout = parameter.device_mesh, parameter.placements
        mesh = parameter.device_mesh
        return moved(parameter, mesh, [Replicate() if a in axes else p for a, p in enumerate(parameter.placements)])

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        mesh, held = ctx.layout
        if torch.is_grad_enabled():
            return relaid(grad, mesh, held), None
        keep = [p if p.is_partial() and not of.is_shard() else of for p, of in zip(grad.placements, held, strict=True)]
        if any(p != to and not p.is_replicate() for p, to in zip(grad.placements, keep, strict=True)):
            return moved(grad, mesh, held), None
        return grad.redistribute(mesh, keep), None


def _whole(tensor: Tensor | None, axes: Sequence[int]) -> Tensor | None:
    """A parameter, gathered along those of the axes that shard it."""
    sharded = isinstance(tensor, DTensor) and any(tensor.placements[axis].is_shard() for axis in axes)
    return Whole.apply(tensor, tuple(axes)) if sharded else tensor


@above_autograd("aten::linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``aten::linear`` of DTensors or plain tensors. Differentiable."""
    mesh, placements = input_layout(aten.linear.default, x, weight, bias) if x.dim() else find_layout(x, weight, bias)
    last = x.dim() - 1
    every = range(mesh.ndim)
    if last < 1 or weight.dim() != 2:
        return aten.linear.default.decompose(x, _whole(weight, every), _whole(bias, every))
    names = mesh.mesh_dim_names or ()
    if last == 1:
        if not splits_channels(mesh):
            return aten.linear.default.decompose(x, _whole(weight, every), _whole(bias, every))
        channels = [axis for axis in every if shards_channels(names[axis]) and placements[axis] == Shard(0)]
        if channels and isinstance(x, DTensor):  # positions of all samples in one dim
            x = relaid(x, mesh, [Shard(1) if axis in channels else p for axis, p in enumerate(placements)])
        return Linear.apply(x, weight, bias)
    positions = [axis for axis in every if isinstance(placements[axis], Shard) and placements[axis] != Shard(last)]
    parameters = _whole(weight, positions), _whole(bias, positions)
    lying = channel_layout(mesh, tuple(Shard(int(p == Shard(last))) if isinstance(p, Shard) else p for p in placements))
    if dim_axes(mesh, lying, 1):
        return Linear.apply(x, *parameters)
    own: Any = [None if p is None else brought(p, mesh, replicated(mesh), positions) for p in parameters]
    y = functional.linear(brought(x, mesh, placements), *own)
    return wrapped(y, mesh, placements, (*x.shape[:-1], weight.shape[0]))


@rule("aten::linear")
def linear_alone(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In inference mode."""
    return linear(x, weight, bias)
