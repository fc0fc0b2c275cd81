"""Convolutions and transposed ones of any stride, padding, dilation and groups; samples, channels and space sharded.

Forward: each rank fetches the inputs that its outputs read, and convolves them. Backward: each rank fetches the output
gradients that its own inputs reach. A local ``convolution_backward`` with them gives the gradient of its own inputs. It
also gives exactly the rank's share of the weight's gradient, since every (input, output) pair belongs to the owner of
the input. So a step moves the input's halo once and the gradient's halo once, and saves neither. While the halos of a
large shard travel, the rank convolves what it owns; narrow edges are corrected when they have arrived (edges).

Where channels are sharded, a rank convolves with its block of the weight (see `distconv.settings.channels`). It first
fetches the channels that the block reads, and afterwards the ranks add up their partial results at the owners of the
filters. Fetched channels are not kept for backward: dL/dweight fetches them again. A rank computes while channels
travel: it first makes what others wait for, and uses what it owns before what arrives. A small layer is computed in one
piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distconv.rules.convolution import overlap
from distconv.rules.convolution.local import LocalConvolution
from distconv.rules.convolution.plan import ConvolutionPlan, make_convolution_plan
from distconv.rules.operands.as_gradient import as_gradient
from distconv.rules.operands.channel_split import held_as, layer_input, parameter_layout
from distconv.rules.registry import rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.mesh_options import channel_algorithm
from distconv.transfer.exchange import Exchange
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import moved
from mucudnn.convolution.geometry import Interval, length
from mucudnn.runtime.local_work import LocalWork
from mucudnn.runtime.shim import marks_local_work


def _plan_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, mesh: DeviceMesh, placements: Sequence[Placement], arguments: Any
) -> ConvolutionPlan:
    stride, padding, dilation, transposed, output_padding, groups = arguments
    return make_convolution_plan(
        mesh,
        tuple(placements),
        tuple(x.shape),
        tuple(weight.shape),
        held_as(weight, mesh),
        channel_algorithm(mesh),
        (x.dtype, weight.dtype, None if bias is None else bias.dtype),
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        transposed,
        tuple(output_padding),
        groups,
    )


def _gathered(parameter: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    """A weight or bias of a layer of such an input, on all ranks that need it whole."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
        return parameter
    kept = parameter_layout(mesh, parameter.placements, placements)
    return moved(parameter, mesh, kept) if kept != tuple(parameter.placements) else parameter


def _summed(placements: Sequence[Placement], held: Sequence[Placement], axes: Sequence[int]) -> tuple[Placement, ...]:
    """The layout of a parameter's gradient: sharded as the parameter is, a partial sum along the other shards of x."""
    return tuple(
        of if axis in axes else Partial() if isinstance(p, Shard) else Replicate()
        for axis, (p, of) in enumerate(zip(placements, held, strict=True))
    )


def convolved(plan: ConvolutionPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """This rank's y, from its x and its block of the weight. Collective over the axes that the plan exchanges along."""
    if plan.is_own and marks_local_work(x.device.type):
        with LocalWork():
            return _convolved(plan, x, weight, bias)
    return _convolved(plan, x, weight, bias)


def _convolved(plan: ConvolutionPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    parts = plan.split
    local = LocalConvolution(plan, weight)
    halos = [side.inputs for side in plan.sides]
    if plan.overlap is not None and parts.is_whole:
        y = overlap.forward(local, plan.overlap, x, bias)
    elif parts.is_local:
        pieces = _arriving(parts.channels, x, plan, halos)
        channels, piece = next(pieces)
        y = local.forward(piece, bias, channels, local.filters)
        for channels, piece in pieces:
            y += local.forward(piece, None, channels, local.filters)
    else:
        wide = _whole(parts.channels, x, halos)

        def partial(filters: Interval) -> Tensor:
            return local.forward(wide, None, local.channels, filters)

        y = _leaving(parts.filters, partial, plan, plan.out_local, x)
        if bias is not None:
            y += bias.view(-1, *[1] * (y.dim() - 2))
    return y


def convolution_gradients(
    plan: ConvolutionPlan, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those asked for of this rank's dL/dx and of its shares of dL/dweight and dL/dbias. Collective, too."""
    if plan.is_own and marks_local_work(x.device.type):
        with LocalWork():
            return _convolution_gradients(plan, grad, x, weight, mask)
    return _convolution_gradients(plan, grad, x, weight, mask)


def _convolution_gradients(
    plan: ConvolutionPlan, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    parts, local = plan.split, LocalConvolution(plan, weight)
    dx: Tensor | None = None
    dw: Tensor | None = None
    if mask[0] or mask[1]:
        if plan.overlap is not None and parts.is_whole:
            dx, dw = overlap.backward(local, plan.overlap, grad, x, mask[0], mask[1])
        else:
            make = _from_arriving_gradients if parts.channels.is_identity else _from_arriving_inputs
            dx, dw = make(local, grad, x, mask)
    return dx, dw, grad.sum([0, *range(2, grad.dim())]) if mask[2] else None


@rule("aten::convolution")
def convolution(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> DTensor:
    """y (N, F, out...) from x (N, C, in...); y is sharded as x is."""
    mesh, placements = layer_input(func, x, weight, bias)
    weight, bias = (_gathered(parameter, mesh, placements) for parameter in (weight, bias))
    plan = _plan_of(x, weight, bias, mesh, placements, rest)
    parts = plan.split
    own_bias = None if bias is None else local_as(bias, mesh, parts.vector)
    y = convolved(plan, local_as(x, mesh, placements), local_as(weight, mesh, parts.weight), own_bias)
    return wrap(y, mesh, placements, plan.out_shape)


@rule("aten::convolution_backward")
def convolution_backward(
    func: Any, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, *rest: Any
) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """dL/dx sharded as x is; dL/dweight and dL/dbias as partial sums over the shards of samples and space."""
    *arguments, mask = rest
    mesh, placements = layer_input(func, x, grad, weight)
    placements = as_gradient(placements, grad)
    weight = _gathered(weight, mesh, placements)
    plan = _plan_of(x, weight, None, mesh, placements, arguments)
    parts = plan.split
    own_x, own_grad = local_as(x, mesh, placements), local_as(grad, mesh, placements)
    dx, dw, db = convolution_gradients(plan, own_grad, own_x, local_as(weight, mesh, parts.weight), mask)
    return (
        wrap(dx, mesh, placements, x.shape) if dx is not None else None,
        wrap(dw, mesh, _summed(placements, parts.weight, parts.axes), weight.shape) if dw is not None else None,
        wrap(db, mesh, _summed(placements, parts.vector, parts.axes), plan.out_shape[1:2]) if db is not None else None,
    )


def _from_arriving_gradients(
    local: LocalConvolution, grad: Tensor, x: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dL/dx and dL/dweight where a rank reads its own channels only."""
    dx: Tensor | None = None
    dws: dict[Interval, Tensor] = {}
    parts = local.plan.split
    for filters, piece in _arriving(parts.filters, grad, local.plan, [side.grads for side in local.plan.sides]):
        more, dw = local.backward(piece, x, local.channels, filters, *mask[:2])
        dx = more if dx is None or more is None else dx.add_(more)
        if dw is not None:
            dws[filters] = dw
    return dx, _in_order(dws, local.plan.layer.filter_dim)


def _from_arriving_inputs(
    local: LocalConvolution, grad: Tensor, x: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dL/dx and dL/dweight where a rank reads others' channels: these arrive once more while dL/dx is made."""
    plan, parts = local.plan, local.plan.split
    wide = _whole(parts.filters, grad, [side.grads for side in plan.sides])
    pieces = _arriving(parts.channels, x, plan, [])
    begun = [next(pieces)] if mask[1] else []

    def data_gradient(channels: Interval) -> Tensor:
        shape_only = x.new_empty(x.shape[0], length(channels), *x.shape[2:])
        dx, _ = local.backward(wide, shape_only, channels, local.filters, True, False)
        assert dx is not None
        return dx

    dx = _leaving(parts.channels, data_gradient, plan, x.shape, x) if mask[0] else None
    dws: dict[Interval, Tensor] = {}
    for channels, piece in itertools.chain(begun, pieces if mask[1] else ()):
        _, dw = local.backward(wide, piece, channels, local.filters, False, True)
        assert dw is not None
        dws[channels] = dw
    return dx, _in_order(dws, plan.layer.channel_dim)


def _arriving(
    which: Exchange, own: Tensor, plan: ConvolutionPlan, halos: Sequence[Exchange]
) -> Iterator[tuple[Interval, Tensor]]:
    """The inputs that ``which`` fetches for the block, with halos and intervals; in pieces if the plan says so.

    With halos it comes at once: each piece would need messages of its own.
    """
    if plan.by_channels and not halos:
        return which.fetch_in_turn(own)
    return iter([((0, which.plan.extent), _whole(which, own, halos))])


def _whole(which: Exchange, own: Tensor, halos: Sequence[Exchange]) -> Tensor:
    wide = which.fetch(own)
    for halo in halos:
        wide = halo.fetch(wide)
    return wide


def _leaving(
    which: Exchange, make: Callable[[Interval], Tensor], plan: ConvolutionPlan, shape: Sequence[int], like: Tensor
) -> Tensor:
    """What the block makes, added up at its owners: what others wait for comes first if the plan says so."""
    if plan.by_channels:
        return which.adjoint_in_turn(make, shape, like)
    return which.adjoint(make((0, which.plan.extent)))


def _in_order(parts: dict[Interval, Tensor], dim: int) -> Tensor | None:
    ordered = [parts[interval] for interval in sorted(parts)]
    return None if not ordered else ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim)
