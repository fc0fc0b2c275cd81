"""Homes of parameters (their layouts), and buckets: lists of parameters whose gradients are summed together."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv.model.direct.shaped_layout import ShapedLayout, shaped_layout
from distconv.model.fully_sharded import is_fully_sharded, used_placements
from distconv.tensors.layouts import replicated
from distconv.tensors.mesh import sharded_dims
from distconv.transfer.group import joint_group

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20

ALONE = "_distconv_alone"
"""An attribute of parameters that share a bucket with no other: their gradients are summed as soon as they are there,
as those of fully sharded parameters are."""


def home(parameter: Tensor, mesh: DeviceMesh) -> ShapedLayout:
    """The layout in which functions use a parameter.

    A plain parameter is replicated on its module's mesh, ``mesh``. One that is sharded along all axes is gathered for
    its uses: it is sharded only along the axes of channels.
    """
    placements = replicated(mesh)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        if is_fully_sharded(parameter):
            placements = used_placements(mesh, placements)
    return shaped_layout(mesh, placements, parameter.shape)


def group_of(place: ShapedLayout) -> dist.ProcessGroup | None:
    """The ranks with the same part as this one; None for this rank alone. Collective where it must be made."""
    mesh = place.mesh
    same = tuple(axis for axis, p in enumerate(place.placements) if p.is_replicate() and mesh.size(axis) > 1)
    return joint_group(mesh, same) if same else None


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, as a plain tensor without autograd."""
    if isinstance(parameter, DTensor):
        return parameter._local_tensor
    with torch._C.DisableTorchFunctionSubclass():  # the class of a parameter in use has another `detach`
        return parameter.detach()


def buckets(parameters: Mapping[Tensor, Hashable]) -> list[list[Tensor]]:
    """Divides parameters, in the order in which backward reaches them, into lists that share a bucket.

    The parameters of a list have the same value in ``parameters``, the same device and dtype, and about as many bytes
    on a rank as a bucket may have. The first list is small, so that its allreduce starts early. All ranks make the same
    lists, as the size of a parameter is that of its largest part on any rank.
    """
    result: list[list[Tensor]] = []
    filling: dict[Hashable, tuple[list[Tensor], int, int]] = {}
    for parameter in reversed(list(parameters)):
        key = parameters[parameter], parameter.dtype, parameter.device
        members, size, limit = filling.get(key, ([], 0, 0))
        if size >= limit or hasattr(parameter, ALONE):
            members, size, limit = [], 0, BUCKET_BYTES if result else FIRST_BUCKET_BYTES
            result.append(members)
        members.append(parameter)
        size += _largest(parameter) * parameter.element_size()
        filling[key] = members, size, 0 if hasattr(parameter, ALONE) else limit
    return result


def _largest(parameter: Tensor) -> int:
    """The elements of the largest part of a parameter on any rank."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for axis, dim in sharded_dims(parameter.device_mesh, parameter.placements):
            shape[dim] = -(-shape[dim] // parameter.device_mesh.size(axis))
    return math.prod(shape)
