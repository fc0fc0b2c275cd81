"""Linear layers of (samples, features) with features sharded: a convolution over one position (distconv.channels).

Features that a flatten has left sharded along space as well are one more split of x; y is sharded along the channel
axes alone, and replicated along the others, as all activations without space are. An input of other dims, such as
(samples, positions, features), has its dim 1 sharded: there a rank multiplies what it owns by the whole weight, which
is gathered if it is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distconv.channels import ChannelMap
from distconv.dtensors import wrap
from distconv.layouts import coordinate, dim_axes, find_layout, owners, replicated
from distconv.partition import shards_channels, splits_channels
from distconv.rules.channel_split import Split, layer_input, split
from distconv.rules.registry import above_autograd, rule
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.local_part import local_as
from distconv.transfer.needs import window
from distconv.transfer.redistribution import moved
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Interval

aten = torch.ops.aten


@dataclass(frozen=True)
class LinearPlan:
    """How the tensors of one linear layer lie."""

    mesh: DeviceMesh
    x: tuple[Placement, ...]
    y: tuple[Placement, ...]
    split: Split
    spread: Exchange
    """From the part of y that this rank adds up to what it holds: more, along the axes that replicate y."""
    part: Interval
    """Where that part begins and ends in what it holds."""

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
    """Of x (samples, features) and weight (filters, features)."""
    mesh, placements = layer_input(aten.linear.default, x, weight, *others)
    names = mesh.mesh_dim_names or ()
    inner = tuple(axis for axis in dim_axes(mesh, placements, 1) if not shards_channels(names[axis]))
    parts = split(aten.linear.default, mesh, placements, ChannelMap(weight.shape[1], weight.shape[0]), weight, inner)
    after = tuple(Replicate() if axis in inner else placement for axis, placement in enumerate(placements))
    return LinearPlan(mesh, placements, after, parts, *_spread(mesh, parts.axes, inner, weight.shape[0]))


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
        if x.shape[1] != weight.shape[1]:
            raise RuntimeError(f"linear layer of an input {tuple(x.shape)} with a weight {tuple(weight.shape)}")
        ctx.save_for_backward(x, weight)
        local = at.split.channels.fetch(local_as(x, at.mesh, at.x))
        y = at.split.filters.adjoint(local @ at.block_of(weight).t())
        y = at.spread.fetch(y)
        if bias is not None:
            y = y + local_as(bias, at.mesh, at.vector())
        return wrap(y, at.mesh, at.y, (x.shape[0], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
        x, weight = ctx.saved_tensors
        at = linear_plan(x, weight, grad)
        own = local_as(grad, at.mesh, at.y)
        for_x, for_weight, for_bias = ctx.needs_input_grad
        dx = dw = db = None
        if for_x or for_weight:
            wide = at.split.filters.fetch(own[:, slice(*at.part)])
        if for_x:
            local = at.split.channels.adjoint(wide @ at.block_of(weight))
            dx = wrap(local, at.mesh, at.x, x.shape)
        if for_weight:
            local = wide.t() @ at.split.channels.fetch(local_as(x, at.mesh, at.x))
            local = local.reshape(local_as(weight, at.mesh, at.split.weight).shape)
            dw = wrap(local, at.mesh, at.summed(at.split.weight), weight.shape)
        if for_bias:
            db = wrap(own.sum(0), at.mesh, at.summed(at.vector()), weight.shape[:1])
        return dx, dw, db


class Whole(torch.autograd.Function):
    """A sharded parameter, gathered; its gradient goes back to the shards."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> DTensor:
        ctx.layout = parameter.device_mesh, parameter.placements
        mesh = parameter.device_mesh
        return moved(parameter, mesh, replicated(mesh))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        mesh, held = ctx.layout
        keep = [p if p.is_partial() and not of.is_shard() else of for p, of in zip(grad.placements, held, strict=True)]
        if any(p != to and not p.is_replicate() for p, to in zip(grad.placements, keep, strict=True)):
            return moved(grad, mesh, held)
        return grad.redistribute(mesh, keep)


def _whole(tensor: Tensor | None) -> Tensor | None:
    sharded = isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
    return Whole.apply(tensor) if sharded else tensor


@above_autograd("aten::linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``aten::linear`` of DTensors or plain tensors. Differentiable."""
    mesh, _ = find_layout(x, weight, bias)
    if splits_channels(mesh) and x.dim() == 2:
        return Linear.apply(x, weight, bias)
    return aten.linear.default.decompose(x, _whole(weight), _whole(bias))


@rule("aten::linear")
def linear_alone(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In inference mode."""
    return linear(x, weight, bias)
