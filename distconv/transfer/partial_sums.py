"""Reduces partial sums: by one collective over all their mesh axes, where DTensor does one for each axis."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Partial

from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import added_up
from distconv.transfer.collectives import MAX, MIN, PRODUCT, SUM, all_reduced
from distconv.transfer.group import joint_group

OPERATIONS = {"sum": SUM, "avg": SUM, "max": MAX, "min": MIN, "product": PRODUCT}
"""The operations by the name of torch's partial placement."""


def added(x: DTensor) -> DTensor:
    """``x`` with every partial placement reduced to a replicated one. Collective where there is one. No autograd."""
    partial = [axis for axis, placement in enumerate(x.placements) if placement.is_partial()]
    if not partial:
        return x
    placements = added_up(x.placements)
    kinds = {placement.reduce_op for placement in x.placements if type(placement) is Partial}
    if len(kinds) != 1 or any(type(x.placements[axis]) is not Partial for axis in partial) or kinds - {*OPERATIONS}:
        return x.redistribute(placements=placements)
    mesh, (kind,) = x.device_mesh, kinds
    axes = tuple(axis for axis in partial if mesh.size(axis) > 1)
    local = x._local_tensor
    result = local.clone(memory_format=torch.contiguous_format)
    if axes:
        result = all_reduced(result, joint_group(mesh, axes), OPERATIONS[kind])
    if kind == "avg":
        result = result / math.prod(mesh.size(axis) for axis in axes)
    return wrap(result.to(local.dtype), mesh, placements, x.shape)
