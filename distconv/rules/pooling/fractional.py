"""Fractional max pooling: its windows are at random positions of whole maps, so shards of space move to other dims."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from distconv.rules.operands.layouts import common_layout, layout_beside
from distconv.rules.operands.own_parts import as_own_part, wrapped
from distconv.rules.registry import above_autograd
from distconv.rules.schemas import operator
from distconv.rules.whole import permit
from distconv.tensors.layouts import local_shape, replicated
from distconv.transfer.redistribution import redistributed


@above_autograd("aten::fractional_max_pool2d")
@above_autograd("aten::fractional_max_pool3d")
def pool(x: Tensor, kernel: Sequence[int], size: Sequence[int], draws: Tensor) -> tuple[DTensor, DTensor]:
    """Largest elements and their places, of maps (N, C, spatial...) and draws (N, C, dims of space) from 0 to 1."""
    func = operator(f"fractional_max_pool{len(size)}d")
    mesh, placements = common_layout(x, draws)
    before = x.dim() - len(size)
    whole = layout_beside(mesh, tuple(placements), tuple(x.shape), frozenset(range(before, x.dim())))
    if whole is None:
        why = "it needs whole maps, and has no samples or channels that could be sharded instead"
        permit(func, (x, draws), why)
        whole = placements = replicated(mesh)
    of_draws = tuple(Shard(p.dim + 2 - before) if isinstance(p, Shard) else Replicate() for p in whole)
    shape = (*x.shape[:before], *size)
    own, own_draws = as_own_part(x, mesh, whole), as_own_part(draws, mesh, of_draws)
    if own.numel():
        results = func(own, kernel, size, own_draws)
    else:  # in a graph of autograd as on the ranks that have elements
        empty = local_shape(mesh, whole, shape)
        results = own.new_zeros(empty) + own.sum(), own.new_zeros(empty, dtype=torch.int64)
    pooled, places = (redistributed(wrapped(each, mesh, whole, shape), mesh, placements) for each in results)
    return pooled, places
