"""Process groups over several mesh axes at once, so that one collective is enough in place of one per axis."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distconv import settings
from distconv.tensors.mesh import whole_group
from distconv.tensors.process_groups import new_group
from distconv.transfer.tracing import planned


@planned(None)  # never dropped: to make one again would be collective
def joint_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of this rank and of those whose coordinates differ from its own along these axes only.

    The first call makes it, which all its members must do together.
    """
    whole = whole_group(mesh)  # raises where the job has ended
    if math.prod(mesh.size(axis) for axis in axes) == mesh.size():
        return whole
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    return new_group(_members(mesh, axes), by_members=True)


@planned(None)
def urgent_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The same ranks, for transfers that the next layer waits for: over NCCL another group, whose stream has priority.

    Else a large convolution that does not need a halo could delay it. The first call makes the group, as above.
    """
    whole_group(mesh)  # raises where the job has ended
    group = mesh.get_group(axes[0]) if len(axes) == 1 else joint_group(mesh, axes)
    is_gpu = mesh.device_type == "cuda" and dist.get_world_size(group) > 1
    if not is_gpu or settings.value("halo_priority") == "normal" or "cuda:nccl" not in dist.get_backend_config(group):
        return group
    return new_group(_members(mesh, axes), by_members=True, urgent=True)


@planned(1024)
def joint_order(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The coordinate of each member in the joint group, the last axis running fastest; this rank's place there."""
    members = _members(mesh, axes)
    ranks = sorted(members)
    return tuple(members.index(rank) for rank in ranks), ranks.index(dist.get_rank())


def _members(mesh: DeviceMesh, axes: tuple[int, ...]) -> list[int]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    here = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
    return mesh.mesh[here].flatten().tolist()
