"""Operands: this rank's parts of the tensors that an operator reads, whose layouts may differ, and what moves for it.

Where an operator reads several tensors, an axis shards what it shards of one of them, so that least moves. A tensor
that is sharded by another dim trades it for this one, so that a rank has no more than its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from distconv.tensors.layouts import undoes_shard
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import redistributed_data


def moving(before: Placement, after: Placement, shape: Sequence[int], ranks: int) -> float:
    """The elements that a rank receives where a tensor's placement along an axis changes, in (ranks - 1) / ranks.

    ``shape``: of the whole. ``ranks``: of the axis.
    """
    if before == after or not isinstance(before, Shard):
        return 0.0
    return math.prod(shape) / (ranks if isinstance(after, Shard) else 1)


def part_of(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of a tensor under a layout that was chosen here: gathered along the axes that need it whole."""
    if isinstance(tensor, DTensor) and tensor.device_mesh == mesh and undoes_shard(mesh, tensor.placements, placements):
        tensor = redistributed_data(tensor, mesh, placements)
    return local_as(tensor, mesh, placements)
