"""Convolutions and transposed ones of any stride, padding, dilation and groups; samples, channels and space sharded.

Forward: each rank fetches the inputs that its outputs read, and convolves them. Backward: each rank fetches the output
gradients that its own inputs reach; a local ``convolution_backward`` with them gives the gradient of its own inputs
and, since every (input, output) pair belongs to the owner of the input, exactly its share of the weight's gradient. So
a step moves the input's halo once and the gradient's halo once, and saves neither.

Where channels are sharded a rank convolves with its block of the weight (distconv.channels): before all that it fetches
the channels that the block reads, and afterwards the partial results are added up at the owners of the filters. Fetched
channels are not kept for backward: dL/dweight fetches them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distconv.channels import Block
from distconv.rules import find_layout, local_as, refuse, rule, wrap
from distconv.rules.convolution.plan import Margins, Plan, make_plan
from distconv.rules.split import channel_layout, split
from mucudnn.geometry import Interval, length


def _plan_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, mesh: DeviceMesh, placements: Sequence[Placement], rest: Any
) -> Plan:
    stride, padding, dilation, transposed, output_padding, groups = rest
    return make_plan(
        mesh,
        tuple(placements),
        tuple(x.shape),
        tuple(weight.shape),
        (x.dtype, weight.dtype, None if bias is None else bias.dtype),
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        transposed,
        tuple(output_padding),
        groups,
    )


def _input_layout(func: Any, x: Tensor, *others: Any) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    mesh, placements = find_layout(x, *others)
    if not isinstance(x, DTensor):
        placements = (Replicate(),) * mesh.ndim
    if any(placement.is_partial() for placement in placements):
        raise refuse(func, f"its input is a partial sum: {placements}")
    return mesh, channel_layout(mesh, placements)


def _summed(placements: Sequence[Placement], held: Sequence[Placement], axes: Sequence[int]) -> tuple[Placement, ...]:
    """How the gradient of a parameter lies: sharded as the parameter is, a partial sum along the other shards of x."""
    return tuple(
        of if axis in axes else Partial() if isinstance(p, Shard) else Replicate()
        for axis, (p, of) in enumerate(zip(placements, held, strict=True))
    )


@rule("aten::convolution")
def convolution(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> DTensor:
    """y (N, F, out...) from x (N, C, in...); y is sharded as x is."""
    mesh, placements = _input_layout(func, x, weight, bias)
    plan = _plan_of(x, weight, bias, mesh, placements, rest)
    parts = split(func, mesh, placements, plan.layer, weight)
    own_weight = local_as(weight, mesh, parts.weight)
    own_bias = None if bias is None else local_as(bias, mesh, parts.vector)
    local = parts.channels.fetch(local_as(x, mesh, placements))
    for side in plan.sides:
        local = side.inputs.fetch(local)
    stride, _, dilation, transposed, *_ = rest
    shape = [*plan.out_local]
    shape[1] = length(parts.block.filters)
    if 0 in shape or not parts.block.runs:
        y = local.new_zeros(shape)
    else:
        options = stride, plan.padding, dilation, transposed, plan.output_padding
        y = _convolve(local, own_weight, own_bias if parts.is_local else None, options, parts.block)
        for side in plan.sides:
            if y.shape[side.dim] != side.own:
                y = y.narrow(side.dim, side.skip, side.own)
    if not parts.is_local:
        y = parts.filters.adjoint(y)
        if own_bias is not None:
            y += own_bias.view(-1, *[1] * (y.dim() - 2))
    return wrap(y, mesh, placements, plan.out_shape)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, options: Sequence[Any], block: Block) -> Tensor:
    """The block's filters of a local x; the bias has one number for each."""
    made = [
        torch.ops.aten.convolution.default(
            _part(x, 1, run.channels),
            _part(weight, 0, run.weight),
            None if bias is None else _part(bias, 0, run.filters),
            *options,
            run.groups,
        )
        for run in block.runs
    ]
    return made[0] if len(made) == 1 else torch.cat(made, 1)


def _part(tensor: Tensor, dim: int, interval: Interval) -> Tensor:
    start, stop = interval
    return tensor if stop - start == tensor.shape[dim] else tensor.narrow(dim, start, stop - start)


@rule("aten::convolution_backward")
def convolution_backward(
    func: Any, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, *rest: Any
) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """dL/dx sharded as x is; dL/dweight and dL/dbias as partial sums over the shards of samples and space."""
    *arguments, mask = rest
    mesh, placements = _input_layout(func, x, grad, weight)
    plan = _plan_of(x, weight, None, mesh, placements, arguments)
    parts = split(func, mesh, placements, plan.layer, weight)
    own_weight = local_as(weight, mesh, parts.weight)
    own_grad = local_as(grad, mesh, placements)
    dx: Tensor | None = None
    dw: Tensor | None = None
    if mask[0] or mask[1]:
        wide = parts.filters.fetch(own_grad)
        for side in plan.sides:
            wide = side.grads.fetch(wide)
        local = local_as(x, mesh, placements)
        if mask[1]:
            local = parts.channels.fetch(local)
        elif not parts.channels.is_identity:
            local = local.new_empty(local.shape[0], length(parts.block.channels), *local.shape[2:])  # only its shape
        if not local.numel() or not wide.numel() or not parts.block.runs:
            dx = local.new_zeros(local.shape) if mask[0] else None
            dw = own_weight.new_zeros(own_weight.shape) if mask[1] else None
        else:
            dx, dw = _block_backward(wide, local, own_weight, arguments, plan, parts.block, mask)
        if dx is not None:
            dx = parts.channels.adjoint(dx)
    db = own_grad.sum([0, *range(2, own_grad.dim())]) if mask[2] else None
    return (
        wrap(dx, mesh, placements, x.shape) if dx is not None else None,
        wrap(dw, mesh, _summed(placements, parts.weight, parts.axes), weight.shape) if dw is not None else None,
        wrap(db, mesh, _summed(placements, parts.vector, parts.axes), plan.out_shape[1:2]) if db is not None else None,
    )


def _block_backward(
    grad: Tensor, x: Tensor, weight: Tensor, arguments: Sequence[Any], plan: Plan, block: Block, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dL/dx of the block's channels and dL/dweight of the block, those asked for."""
    data = [(side.dim, side.data) for side in plan.sides]
    filter = [(side.dim, side.filter) for side in plan.sides]
    dxs: list[Tensor] = []
    dws: list[Tensor] = []
    for run in block.runs:
        operands = _part(grad, 1, run.filters), _part(x, 1, run.channels), _part(weight, 0, run.weight)
        options = [*arguments[:-1], run.groups]
        if data == filter:
            dx, dw = _local_backward(*operands, options, plan.output_padding, data, plan.data_padding, *mask[:2])
        else:
            dx = dw = None
            if mask[1]:
                _, dw = _local_backward(
                    *operands, options, plan.output_padding, filter, plan.filter_padding, False, True
                )
            if mask[0]:
                dx, _ = _local_backward(*operands, options, plan.output_padding, data, plan.data_padding, True, False)
        dxs += [] if dx is None else [dx]
        dws += [] if dw is None else [dw]
    return _joined(dxs, 1), _joined(dws, 0)


def _joined(parts: list[Tensor], dim: int) -> Tensor | None:
    return None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _local_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    arguments: Sequence[Any],
    output_padding: list[int],
    margins: list[tuple[int, Margins]],
    padding: list[int],
    for_data: bool,
    for_filter: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """dL/dx of this rank's inputs and its share of dL/dweight, those asked for."""
    zeros = [0] * (2 * (x.dim() - 2))
    for dim, margin in margins:
        at = 2 * (x.dim() - 1 - dim)
        zeros[at : at + 2] = margin.before, margin.after
    padded = torch.ops.aten.constant_pad_nd.default(x, zeros) if any(zeros) else x
    stride, _, dilation, transposed, _, groups = arguments
    dx, dw, _ = torch.ops.aten.convolution_backward.default(
        grad,
        padded,
        weight,
        None,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        [for_data, for_filter, False],
    )
    if for_data and any(zeros):
        for dim, margin in margins:
            dx = dx.narrow(dim, margin.before, x.shape[dim])
    return dx if for_data else None, dw if for_filter else None
