"""Fractional max pooling: its windows are at random positions of whole maps, so shards of space move to other dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.rules.operands.layouts import common_layout, layout_beside, part_of
from distconv.rules.registry import rule
from distconv.rules.whole import whole_or_refused
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import local_shape
from distconv.transfer.redistribution import redistributed_data

WHY = "it needs whole maps, and has no samples or channels that could be sharded instead"


def _maps(
    func: Any, x: Tensor, *others: Tensor
) -> tuple[DeviceMesh, tuple[Placement, ...], tuple[Placement, ...] | None, int]:
    """The mesh, the layout of x, its layout with whole maps, and the number of its dims before those of space."""
    mesh, placements = common_layout(x, *others)
    before = x.dim() - (2 if "2d" in func._schema.name else 3)
    whole = layout_beside(mesh, tuple(placements), tuple(x.shape), frozenset(range(before, x.dim())))
    return mesh, tuple(placements), whole, before


@rule("aten::fractional_max_pool2d", "aten::fractional_max_pool3d")
def pool(func: Any, x: Tensor, kernel: Sequence[int], size: Sequence[int], draws: Tensor) -> tuple[DTensor, DTensor]:
    """Largest elements and their places, of maps (N, C, spatial...) and draws (N, C, dims of space) from 0 to 1."""
    mesh, placements, whole, before = _maps(func, x, draws)
    if whole is None:
        gathered: tuple[DTensor, DTensor] = whole_or_refused(func, (x, kernel, size, draws), {}, WHY)
        return gathered
    of_draws = tuple(Shard(p.dim + 2 - before) if isinstance(p, Shard) else Replicate() for p in whole)
    shape = (*x.shape[:before], *size)
    own, own_draws = part_of(x, mesh, whole), part_of(draws, mesh, of_draws)
    if own.numel():
        results = func(own, kernel, size, own_draws)
    else:
        empty = local_shape(mesh, whole, shape)
        results = own.new_empty(empty), own.new_empty(empty, dtype=torch.int64)
    pooled, places = (redistributed_data(wrap(each, mesh, whole, shape), mesh, placements) for each in results)
    return pooled, places


@rule("aten::fractional_max_pool2d_backward", "aten::fractional_max_pool3d_backward")
def pool_backward(
    func: Any, grad: Tensor, x: Tensor, kernel: Sequence[int], size: Sequence[int], places: Tensor
) -> DTensor:
    """The gradient of x, laid out as x is."""
    mesh, placements, whole, _ = _maps(func, x, grad, places)
    if whole is None:
        gathered: DTensor = whole_or_refused(func, (grad, x, kernel, size, places), {}, WHY)
        return gathered
    own_grad, own, own_places = (part_of(each, mesh, whole) for each in (grad, x, places))
    local = func(own_grad, own, kernel, size, own_places) if own.numel() else own.new_zeros(own.shape)
    return redistributed_data(wrap(local, mesh, whole, x.shape), mesh, placements)
