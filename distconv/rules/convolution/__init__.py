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

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from distconv.rules.convolution import overlap
from distconv.rules.convolution.local import LocalConvolution
from distconv.rules.convolution.plan import ConvolutionPlan, make_convolution_plan
from distconv.rules.operands.channel_split import layer_input, parameter_layout
from distconv.rules.operands.own_parts import Takes, apply, as_own_part, taken, wrapped
from distconv.rules.operands.sums import all_reduce
from distconv.rules.registry import above_autograd, rule
from distconv.tensors.layouts import placements_on
from distconv.tensors.mesh import channel_algorithm
from distconv.transfer.exchange import Exchange
from distconv.transfer.tracing import is_traced
from mucudnn.convolution.geometry import Interval, length
from mucudnn.runtime.decision import LocalWork, marking


def convolved(plan: ConvolutionPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """This rank's y, from its x and its block of the weight. Collective over the axes that the plan exchanges along."""
    parts = plan.split
    local = LocalConvolution(plan, weight)
    every_channel, every_filter = parts.block.every
    with marked(plan, x) if marking else UNMARKED:
        if plan.overlap is not None and parts.is_whole:
            return overlap.forward(local, plan.overlap, x, bias)
        if parts.is_local:
            if not plan.in_pieces:
                return local.forward(plan.inputs.fetch(x), bias, every_channel, every_filter)
            pieces = parts.channels.fetch_in_turn(x)
            channels, piece = next(pieces)
            y = local.forward(piece, bias, channels, every_filter)
            for channels, piece in pieces:
                y += local.forward(piece, None, channels, every_filter)
            return y
        wide = plan.inputs.fetch(x)

        def partial(filters: Interval) -> Tensor:
            return local.forward(wide, None, every_channel, filters)

        y = _leaving(parts.filters, partial, plan, plan.out_local, x)
        if bias is not None:
            y += bias.view(-1, *[1] * (y.dim() - 2))
        return y


def convolution_gradients(
    plan: ConvolutionPlan, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """This rank's dL/dx, and its shares of dL/dweight and dL/dbias, where they are asked for. Collective, too."""
    parts, local = plan.split, LocalConvolution(plan, weight)
    dx: Tensor | None = None
    dw: Tensor | None = None
    with marked(plan, x) if marking else UNMARKED:
        if mask[0] or mask[1]:
            if plan.overlap is not None and parts.is_whole:
                dx, dw = overlap.backward(local, plan.overlap, grad, x, mask[0], mask[1])
            else:
                make = _from_arriving_gradients if parts.channels.is_identity else _from_arriving_inputs
                dx, dw = make(local, grad, x, mask)
        return dx, dw, grad.sum([0, *range(2, grad.dim())]) if mask[2] else None


def marked(plan: ConvolutionPlan, x: Tensor) -> contextlib.AbstractContextManager[None]:
    """Within, mucudnn takes what it computes for work of this rank alone, where it is that."""
    return LocalWork() if plan.is_own and x.device.type in marking else UNMARKED


UNMARKED = contextlib.nullcontext()


class Convolution(torch.autograd.Function):
    """`convolved`, any number of times differentiable. Gradients of block and bias are this rank's shares, which are
    handed to ``takes``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan, takes: Takes = (None, None)
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan, ctx.takes = plan, takes
        y = convolved(plan, x, weight, bias)
        return y.clone() if y._base is not None else y  # a part of a tensor could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        mask, (take_weight, take_bias) = ctx.needs_input_grad[:3], ctx.takes
        if torch.is_grad_enabled():
            weight = weight if take_weight is None else take_weight.arriving(weight)
            return *apply(_Gradients, ctx.plan, grad, x, weight, mask), None, None
        dx, dw, db = convolution_gradients(ctx.plan, grad, x, weight, mask)
        return dx, taken(dw, take_weight), taken(db, take_bias), None, None


class _Gradients(torch.autograd.Function):
    """The gradients of a convolution, which is linear in x and in its weight: derivatives of these are convolutions
    and gradients of convolutions whose tensors have the layouts of the layer's.

    Torch's formula would convolve x with the gradient, as if that were a weight.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: ConvolutionPlan, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        ctx.save_for_backward(grad, x, weight)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return convolution_gradients(plan, grad, x, weight, mask)

    @staticmethod
    def backward(ctx: Any, for_x: Tensor | None, for_w: Tensor | None, for_bias: Tensor | None) -> tuple[Any, ...]:
        grad, x, weight = ctx.saved_tensors
        plan, (_, need_grad, need_x, need_w, _) = ctx.plan, ctx.needs_input_grad
        parts = []
        if need_grad:
            if for_x is not None:
                parts.append(apply(Convolution, for_x, weight, None, plan))
            if for_w is not None:
                parts.append(apply(Convolution, x, for_w, None, plan))
            if for_bias is not None:
                parts.append(for_bias.view(-1, *[1] * (grad.dim() - 2)).expand_as(grad))
        dgrad = sum(parts[1:], parts[0]) if parts else None
        dx = dw = None
        if need_x and for_w is not None:
            dx = apply(_Gradients, plan, grad, x, for_w, (True, False, False))[0]
        if need_w and for_x is not None:
            dw = apply(_Gradients, plan, grad, for_x, weight, (False, True, False))[1]
        return None, dgrad, dx, dw, None


@above_autograd("aten::convolution")
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> DTensor:
    """y (N, F, out...) from x (N, C, in...); y is sharded as x is."""
    mesh, placements = layer_input(torch.ops.aten.convolution.default, x, weight, bias)
    plan, summed = _planned(mesh, placements, x, weight, bias, arguments)
    parts = plan.split
    own_bias = None if bias is None else as_own_part(bias, mesh, parts.vector, summed)
    own_weight = as_own_part(weight, mesh, parts.weight, summed)
    y = apply(Convolution, as_own_part(x, mesh, placements), own_weight, own_bias, plan)
    return wrapped(y, mesh, placements, plan.out_shape)


@rule("aten::convolution_backward")
def asked_gradients(
    func: Any, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """dL/dx, dL/dweight and dL/dbias where a program asks for them itself, by `torch.nn.grad` or in a function of its
    own; `Convolution` gives those of its convolutions."""
    *arguments, mask = rest
    # An x that is not read may be a single element, expanded to its shape.
    mesh, placements = layer_input(func, x if mask[1] else grad, weight)
    plan, summed = _planned(mesh, placements, x, weight, None, arguments)
    own_grad, own_x = (as_own_part(each, mesh, placements) for each in (grad, x))
    dx, dw, db = convolution_gradients(plan, own_grad, own_x, as_own_part(weight, mesh, plan.split.weight), mask)
    return (
        None if dx is None else wrapped(dx, mesh, placements, x.shape),
        None if dw is None else wrapped(all_reduce(dw, mesh, summed), mesh, plan.split.weight, weight.shape),
        None if db is None else wrapped(all_reduce(db, mesh, summed), mesh, plan.split.vector, bias_sizes),
    )


def _planned(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arguments: Sequence[Any],
) -> tuple[ConvolutionPlan, list[int]]:
    """The plan, and the axes along which ranks have shares of the gradients of weight and bias."""
    plan = make_convolution_plan(
        mesh,
        tuple(placements),
        tuple(x.shape),
        tuple(weight.shape),
        parameter_layout(mesh, placements_on(weight, mesh), placements),
        channel_algorithm(mesh),
        (x.dtype, weight.dtype, None if bias is None else bias.dtype),
        tuple(tuple(each) if isinstance(each, list) else each for each in arguments),
    )
    axes = plan.split.axes
    return plan, [axis for axis, p in enumerate(placements) if isinstance(p, Shard) and axis not in axes]


def _from_arriving_gradients(
    local: LocalConvolution, grad: Tensor, x: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dL/dx and dL/dweight where a rank reads its own channels only."""
    plan, parts = local.plan, local.plan.split
    every_channel, every_filter = parts.block.every
    if not plan.in_pieces:
        return local.backward(plan.grads.fetch(grad), x, every_channel, every_filter, *mask[:2])
    dx: Tensor | None = None
    dws: dict[Interval, Tensor] = {}
    for filters, piece in parts.filters.fetch_in_turn(grad):
        more, dw = local.backward(piece, x, every_channel, filters, *mask[:2])
        dx = more if dx is None or more is None else dx.add_(more)
        if dw is not None:
            dws[filters] = dw
    return dx, _in_order(dws, plan.layer.filter_dim)


def _from_arriving_inputs(
    local: LocalConvolution, grad: Tensor, x: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dL/dx and dL/dweight where a rank reads others' channels: these arrive once more while dL/dx is made."""
    plan, parts = local.plan, local.plan.split
    wide, (every_channel, every_filter) = plan.grads.fetch(grad), parts.block.every
    # In a graph that is traced dL/dx does not wait for x, or fewer collectives could be merged.
    if not plan.by_channels and mask[0] and mask[1] and not is_traced(grad):
        dx, dw = local.backward(wide, parts.channels.fetch(x), every_channel, every_filter, True, True)
        assert dx is not None
        return parts.channels.adjoint(dx), dw
    pieces = parts.channels.fetch_in_turn(x) if plan.by_channels else iter([(every_channel, parts.channels.fetch(x))])
    begun = [next(pieces)] if mask[1] else []

    def data_gradient(channels: Interval) -> Tensor:
        shape_only = x.new_empty(x.shape[0], length(channels), *x.shape[2:])
        dx, _ = local.backward(wide, shape_only, channels, every_filter, True, False)
        assert dx is not None
        return dx

    dx = _leaving(parts.channels, data_gradient, plan, x.shape, x) if mask[0] else None
    dws: dict[Interval, Tensor] = {}
    for channels, piece in itertools.chain(begun, pieces if mask[1] else ()):
        _, dw = local.backward(wide, piece, channels, every_filter, False, True)
        assert dw is not None
        dws[channels] = dw
    return dx, _in_order(dws, plan.layer.channel_dim)


def _leaving(
    which: Exchange, make: Callable[[Interval], Tensor], plan: ConvolutionPlan, shape: Sequence[int], like: Tensor
) -> Tensor:
    """The block's outputs, added up at their owners; those of other ranks are computed first if the plan says so."""
    if plan.by_channels:
        return which.adjoint_in_turn(make, shape, like)
    return which.adjoint(make((0, which.plan.extent)))


def _in_order(parts: dict[Interval, Tensor], dim: int) -> Tensor | None:
    ordered = [parts[interval] for interval in sorted(parts)]
    return None if not ordered else ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim)
