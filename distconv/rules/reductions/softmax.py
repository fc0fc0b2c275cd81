"""Softmax and log-softmax, also over a sharded dim: two small allreduces in forward, one in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.operands import part_of
from distconv.rules.operands.layouts import common_layout
from distconv.rules.operands.sums import all_reduce, lowest, precise, settled
from distconv.rules.reductions import reduced_axes
from distconv.rules.registry import rule
from distconv.tensors.dtensors import wrap
from distconv.transfer.collectives import MAX


@rule("aten::_softmax", "aten::_log_softmax")
def softmax(func: Any, x: DTensor, dim: int, half_to_float: bool) -> DTensor:
    """exp(x) over its sum along dim, or the logarithm of that; laid out as x is."""
    local, (mesh, placements) = settled(func, x)
    axes = reduced_axes(mesh, placements, [dim % max(x.dim(), 1)])
    if not axes:
        return wrap(func(local, dim, half_to_float), mesh, placements, x.shape)
    wide = local.to(precise(local.dtype))
    shape = list(local.shape)
    shape[dim] = 1
    own = wide.amax(dim, keepdim=True) if local.shape[dim] else wide.new_full(shape, lowest(wide.dtype, True))
    shifted = wide - all_reduce(own, mesh, axes, MAX)
    total = all_reduce(shifted.exp().sum(dim, keepdim=True), mesh, axes)
    result = shifted - total.log() if "log" in func._schema.name else shifted.exp() / total
    return wrap(result if half_to_float else result.to(local.dtype), mesh, placements, x.shape)


@rule("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def softmax_backward(func: Any, grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> DTensor:
    """The gradient of x from the result y, laid out as y is where that is sharded; one of the two may be plain."""
    mesh, placements = common_layout(y, grad)
    own, local = part_of(grad, mesh, placements), part_of(y, mesh, placements)
    axes = reduced_axes(mesh, placements, [dim % max(y.dim(), 1)])
    if not axes:
        return wrap(func(own, local, dim, input_dtype), mesh, placements, y.shape)
    if "log" in func._schema.name:
        dx = own - local.exp() * all_reduce(own.sum(dim, keepdim=True), mesh, axes)
    else:
        dx = local * (own - all_reduce((own * local).sum(dim, keepdim=True), mesh, axes))
    return wrap(dx.to(input_dtype), mesh, placements, y.shape)
