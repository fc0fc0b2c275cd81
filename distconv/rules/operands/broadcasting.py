"""Tensors that broadcast to a shape, each laid out to match the others.

Along one axis all are sharded by the same dim of the result, the one for which least moves. A tensor without that dim,
or with extent 1 there, is needed whole: it is no larger than a rank's share of the result.

If an axis shards a dim of extent 1, the first rank of the axis owns the element and the others nothing. Beside a longer
dim each rank needs it: one exchange fetches it. The gradient of the broadcast tensor is a sum over the dim, which is
replicated (``reduction``), and so it reaches the owner. The two operations are each other's adjoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.rules.operands import moving, part_of
from distconv.rules.operands.layouts import common_layout
from distconv.tensors.layouts import Layout, replicated
from distconv.transfer.tracing import planned


def sharding(tensors: Sequence[Tensor], shape: Sequence[int]) -> Layout:
    """The layout of the result of tensors that broadcast to a shape."""
    mesh, _ = common_layout(*tensors)
    layouts = (x.placements if isinstance(x, DTensor) and x.device_mesh == mesh else replicated(mesh) for x in tensors)
    operands = tuple((placements, tuple(x.shape)) for placements, x in zip(layouts, tensors, strict=True))
    return mesh, broadcast_result(mesh, operands, tuple(shape))


@planned(4096)
def broadcast_result(
    mesh: DeviceMesh, operands: tuple[tuple[tuple[Placement, ...], tuple[int, ...]], ...], shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    """The layout of what such tensors broadcast to. Of what costs the same, the first tensor decides."""
    result: list[Placement] = []
    for axis, ranks in enumerate(mesh.shape):
        costs: dict[Placement, float] = {}
        for placements, own in operands:
            placement = placements[axis]
            if isinstance(placement, Shard):
                way = Shard(placement.dim + len(shape) - len(own))
                after = [(layouts[axis], broadcast_layout(of, [way], shape)[0], of) for layouts, of in operands]
                costs[way] = sum(moving(p, to, of, ranks) for p, to, of in after)
        result.append(min(costs, key=costs.__getitem__, default=Replicate()))
    return tuple(result)


def aligned(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> Tensor:
    """This rank's part of a tensor that broadcasts to ``shape``, of which it has the part that ``placements`` say."""
    return part_of(tensor, mesh, broadcast_layout(tensor.shape, placements, shape))


def broadcast_layout(
    own: Sequence[int], placements: Sequence[Placement], shape: Sequence[int]
) -> tuple[Placement, ...]:
    """The layout of a tensor of shape ``own`` beside one of ``shape``, to which it broadcasts."""
    missing = len(shape) - len(own)
    target: list[Placement] = []
    for placement in placements:
        dim = placement.dim - missing if isinstance(placement, Shard) else -1
        target.append(Shard(dim) if dim >= 0 and own[dim] == shape[dim + missing] else Replicate())
    return tuple(target)
