"""Operands: which dim every mesh axis shards while an operator reads several tensors with different layouts.

The dims of the tensors have subscripts, as in einsum: dims with the same subscript run together, even one of extent 1
beside longer ones. Along one axis all tensors are sharded by the same subscript, the one for which least moves. A
tensor that is sharded by another dim trades it for this one, so that a rank holds no more than its share. A tensor
without that subscript, or with extent 1 there, is needed whole: for an elementwise operator it is no larger than a
rank's share of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.tensors.layouts import replicated
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import moved
from distconv.transfer.tracing import planned


@dataclass(frozen=True)
class Operand:
    """A tensor as an operator reads it: how it lies, its global shape, and the subscript of each dim."""

    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    subscripts: tuple[int, ...]

    def sharded_by(self, subscript: int | None, extent: int) -> Placement:
        """Its placement along an axis that shards a subscript of this extent; None for an axis that shards nothing."""
        if subscript is None or subscript not in self.subscripts:
            return Replicate()
        dim = self.subscripts.index(subscript)
        return Shard(dim) if self.shape[dim] == extent else Replicate()

    def subscript_along(self, axis: int) -> int | None:
        """The subscript that an axis shards of this tensor."""
        placement = self.placements[axis]
        return self.subscripts[placement.dim] if isinstance(placement, Shard) else None

    def moves(self, axis: int, after: Placement, ranks: int) -> float:
        """The elements that come to a rank, in shares of (ranks - 1) / ranks, where it is to lie so along an axis."""
        before = self.placements[axis]
        if not isinstance(before, Shard) or before == after:
            return 0.0
        return math.prod(self.shape) / (ranks if isinstance(after, Shard) else 1)


@planned(4096)
def common_subscripts(
    mesh: DeviceMesh, operands: tuple[Operand, ...], extents: tuple[int, ...], result: tuple[int, ...]
) -> tuple[int | None, ...]:
    """The subscript that each mesh axis shards, None where it shards no tensor.

    ``extents`` counts the positions of each subscript, and ``result`` has the subscripts of the operator's result: a
    sum over one that it lacks is an allreduce of the result. An axis shards what it shards of one of the tensors, or a
    summed subscript. Of what costs the same, the first tensor decides.
    """
    chosen: list[int | None] = []
    for axis in range(mesh.ndim):
        ranks = mesh.size(axis)
        sharding = list(dict.fromkeys(x.subscript_along(axis) for x in operands))
        choices = [subscript for subscript in sharding if subscript is not None]
        if choices:
            choices += [s for s in range(len(extents)) if s not in (*choices, *result)]

        def cost(subscript: int, axis: int = axis, ranks: int = ranks) -> float:
            sums = 0 if subscript in result else 2 * math.prod(extents[s] for s in result)
            return sums + sum(x.moves(axis, x.sharded_by(subscript, extents[subscript]), ranks) for x in operands)

        chosen.append(min(choices, key=cost, default=None))
    return tuple(chosen)


def operand(tensor: Tensor, mesh: DeviceMesh, subscripts: Sequence[int]) -> Operand:
    """A tensor on a mesh as an operand; a plain one, or one on another mesh, counts as replicated."""
    here = isinstance(tensor, DTensor) and tensor.device_mesh == mesh
    placements = tuple(tensor.placements) if here else replicated(mesh)  # type: ignore[attr-defined]
    return Operand(placements, tuple(tensor.shape), tuple(subscripts))


def part_of(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of a tensor under a layout that was chosen here: gathered along the axes that need it whole."""
    if isinstance(tensor, DTensor) and tensor.device_mesh == mesh:
        pairs = zip(tensor.placements, placements, strict=True)
        if any(isinstance(p, Shard) and tensor.shape[p.dim] != 1 and not isinstance(to, Shard) for p, to in pairs):
            tensor = moved(tensor, mesh, placements)
    return local_as(tensor, mesh, placements)
