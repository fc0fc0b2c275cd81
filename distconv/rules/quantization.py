"""Quantization-aware training: an observer sees the smallest and largest element of the whole tensor.

Torch's own operator does the rest, twice: given only these two numbers it updates what the observer keeps; given this
rank's shard, with the observer switched off, it rounds the shard to the observer's grid.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.operands.sums import all_reduce, settled
from distconv.rules.registry import rule
from distconv.tensors.dtensors import local_of, wrap
from distconv.tensors.layouts import local_box
from distconv.transfer.collectives import MAX


@rule("aten::_fused_moving_avg_obs_fq_helper")
def observed(func: Any, x: DTensor, observing: Tensor, rounding: Tensor, *rest: Any) -> tuple[DTensor, DTensor]:
    """x rounded to the observer's grid, and where it was inside.

    Collective over the mesh. The observer's tensors, the first four of ``rest``, are equal on all ranks, and change in
    place; behind them are numbers, the fifth of which says whether each element along dim 0 has a grid of its own.
    """
    kept, numbers = [*map(local_of, rest[:4])], rest[4:]
    per_row = len(numbers) > 4 and numbers[4]
    local, (mesh, placements) = settled(func, x)
    start, stop = local_box(mesh, placements, x.shape)[0] if per_row else (0, 1)
    # The smallest element counts with the opposite sign, so that one maximum over ranks finds both.
    ends = local.new_full((x.shape[0] if per_row else 1, 2), -math.inf)
    if local.numel():
        smallest, largest = local.reshape(stop - start, -1).aminmax(dim=1)
        ends[start:stop] = torch.stack([-smallest, largest], 1)
    ends = all_reduce(ends, mesh, range(mesh.ndim), MAX) * ends.new_tensor([-1, 1])
    func(ends, observing, rounding, *kept, *numbers)
    own = [vector[start:stop] for vector in kept] if per_row else kept
    off = torch.zeros_like(observing)
    if local.numel():
        y, inside = func(local, off, rounding, *own, *numbers)
    else:
        y, inside = local.clone(), torch.ones_like(local, dtype=torch.bool)
    return wrap(y, mesh, placements, x.shape), wrap(inside, mesh, placements, x.shape)
