"""Tensors that broadcast to a shape, each laid out to match the others.

If an axis shards a dim of extent 1, the first rank of the axis owns the element and the others nothing. Beside a longer
dim each rank needs it: one exchange brings it. The gradient of the broadcast tensor is a sum over the dim, which is
replicated (``reduction``), and so it reaches the owner. The two operations are each other's adjoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from distconv.rules.operands import part_of


def aligned(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> Tensor:
    """This rank's part of a tensor that broadcasts to ``shape``, of which it has the part that ``placements`` say."""
    missing = len(shape) - tensor.dim()
    target: list[Placement] = []
    for placement in placements:
        dim = placement.dim - missing if isinstance(placement, Shard) else -1
        target.append(Shard(dim) if dim >= 0 and tensor.shape[dim] == shape[dim + missing] else Replicate())
    return part_of(tensor, mesh, target)
