"""Makes the DeviceMesh of a partition and the layouts of tensors on it; keeps each mesh's options for its modules."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv import settings
from distconv.private_names import ENDED_JOBS, lacks
from distconv.settings.partition import AXES, Partition, shards_channels
from distconv.tensors import hooks
from distconv.tensors.process_groups import new_group, number_of
from mucudnn.spelling import meant

_ENDED: Any = object()  # In place of a destroyed process group: torch's functions refuse it.

_groups: dict[DeviceMesh, tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]] = {}
"""Our meshes, and for each one group of all its ranks, and the default group of its job."""

_is_forked = False  # Whether this process was forked by one that had meshes, whose groups are of no use here.

_meshes: dict[tuple[object, ...], DeviceMesh] = {}
"""The meshes made so far, by the job's default group, partition, ranks and device type."""


@dataclass
class MeshToChoose:
    """The mesh of `distconv.init("auto")`, which the first `parallelize(..., strategy="auto")` settles."""

    device_type: str  # The kind of device of its ranks.
    channel_algorithm: str | None = None  # The channel algorithm that it is to have; None for the job's.
    settled: DeviceMesh | None = None  # The mesh, once it is chosen.


def usable_mesh(mesh: DeviceMesh | MeshToChoose, axes: Mapping[str, str] | None = None) -> DeviceMesh:
    """A mesh that can be used, with ``axes`` as `adopt` takes them. ValueError for one that has not been chosen yet.

    TypeError for anything else, such as a partition.
    """
    if isinstance(mesh, MeshToChoose):
        if mesh.settled is None:
            raise ValueError(
                "the mesh of distconv.init('auto') is chosen by the first distconv.parallelize(model, mesh,"
                " strategy='auto', sample_input=...): call that before the mesh is used"
            )
        mesh = mesh.settled
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh {mesh!r}: accepted: the mesh that distconv.init returns, or another DeviceMesh")
    return _sliced.get(mesh, mesh) if axes is None else adopt(mesh, axes)


def make_mesh(partition: Partition, *, ranks: Sequence[int] | None = None, device_type: str = "cpu") -> DeviceMesh:
    """The mesh of a partition over ``ranks`` (default: all); every rank of the job must call this together."""
    world = dist.get_world_size()
    if ranks is None:
        if partition.ranks != world:
            raise ValueError(f"partition {str(partition)!r} needs {partition.ranks} ranks, but {world} are running")
        ranks = range(world)
    elif len(ranks) != partition.ranks:
        raise ValueError(f"partition {str(partition)!r} needs {partition.ranks} ranks, but ranks= names {len(ranks)}")
    elif list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= world:
        raise ValueError(f"ranks={list(ranks)}: accepted: ascending ranks from 0 to {world - 1}")
    # Every process group has threads and connections of its own: a partition asked for again keeps its groups.
    key = (dist.group.WORLD, partition, tuple(ranks), device_type)
    mesh = _meshes.get(key)
    if mesh is None:
        mesh = DeviceMesh(device_type, torch.tensor(list(ranks)).view(partition.sizes), mesh_dim_names=partition.names)
        _meshes[key] = mesh
        _know(mesh, local=False)
    return mesh


def _know(mesh: DeviceMesh, *, local: bool) -> None:
    """Makes the group of a mesh, and makes the mesh another one than a former job's.

    Meshes over the same ranks are equal else, and plans, which name groups, are kept by their meshes.
    """
    job = dist.group.WORLD
    if mesh._thread_id in (None, threading.get_ident()) and (number := number_of(job)):  # no mesh of parts in turn
        mesh._thread_id = -number
        vars(mesh).pop("_hash", None)  # which it keeps
    ranks = ranks_of(mesh)
    if len(ranks) == dist.get_world_size():
        group = dist.group.WORLD
    elif mesh.ndim == 1:
        group = mesh.get_group(0) if mesh.get_coordinate() is not None else None
    else:
        group = new_group(ranks, by_members=local)
    _groups[mesh] = group, job


_names: dict[DeviceMesh, tuple[str, ...]] = {}
"""Of meshes whose axes have other names: those of `AXES` that they represent."""

_sliced: dict[DeviceMesh, DeviceMesh] = {}
"""By mesh of the program: the slice of it that distconv shards along; the other axes are left to the program."""


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """By axis of a mesh of ours: the name in `AXES` of what it shards."""
    return _names.get(mesh) or mesh.mesh_dim_names or ()


def adopt(mesh: DeviceMesh, axes: Mapping[str, str] | None = None) -> DeviceMesh:
    """Takes a mesh made elsewhere, or the slice of it along the axes that are named; ranks ascend along each of them.

    ``axes``: by name of an axis of the mesh, the one of `AXES` that it represents; None where all have such names.

    Raises:
        ValueError: one line, for other names or ranks, and for a mesh that is in use with other ``axes``.
    """
    given = tuple(mesh.mesh_dim_names or ())
    if axes is None:
        if not given or not set(given) <= set(AXES):
            raise ValueError(
                f"mesh axes {given}: accepted: mesh_dim_names out of {', '.join(AXES)}, or others with axes=, such as"
                f" axes={{{(given or ('dp',))[0]!r}: 'sample'}}"
            )
        return _adopted(mesh)
    for name, stands_for in axes.items():
        if name not in given:
            raise ValueError(f"axes={dict(axes)}: the mesh has no axis {name!r}; accepted: {', '.join(given)}")
        if stands_for not in AXES:
            raise ValueError(f"axes={dict(axes)}: {stands_for!r}{meant(stands_for, AXES)}; accepted: {', '.join(AXES)}")
    names = tuple(name for name in given if name in axes)
    if not names or len(set(axes.values())) < len(axes):
        raise ValueError(f"axes={dict(axes)}: accepted: one or more axes of the mesh, each for another of the data")
    part = mesh if names == given else mesh[names]
    now = tuple(axes[name] for name in names)
    before = _sliced.get(mesh, part)
    if before != part or (part in _groups and axis_names(part) != now):
        in_use = dict(zip(before.mesh_dim_names or (), axis_names(before), strict=True))
        raise ValueError(f"axes={dict(axes)}: the mesh is in use with axes={in_use}; accepted: the same ones")
    _names[part] = now
    _sliced[mesh] = _adopted(part)
    return part


def _adopted(mesh: DeviceMesh) -> DeviceMesh:
    for axis, size in enumerate(mesh.mesh.shape):
        if size > 1 and not bool((mesh.mesh.diff(dim=axis) > 0).all()):
            name = (mesh.mesh_dim_names or ())[axis]
            raise ValueError(f"mesh axis {name!r}: accepted: ranks ascending along the axis, not {mesh.mesh.tolist()}")
    if mesh not in _groups:
        _know(mesh, local=True)
    return mesh


def mesh_like(mesh: DeviceMesh, partition: str | Partition | DeviceMesh | MeshToChoose) -> DeviceMesh:
    """The mesh of a partition over the ranks of one of our meshes; a mesh is taken as it is.

    ValueError for another number of ranks, and for text where the mesh has a part of the job's ranks only: groups are
    made by all ranks together.
    """
    if isinstance(partition, DeviceMesh | MeshToChoose):
        return adopt(usable_mesh(partition))
    parsed = Partition.parse(partition) if isinstance(partition, str) else partition
    ranks = ranks_of(mesh)
    if parsed.ranks != len(ranks):
        raise ValueError(f"partition {str(parsed)!r} needs {parsed.ranks} ranks, but the mesh has {len(ranks)}")
    key = (dist.group.WORLD, parsed, tuple(ranks), mesh.device_type)
    if len(ranks) < dist.get_world_size() and key not in _meshes:
        raise ValueError(
            f"partition {str(parsed)!r} over ranks {ranks}: accepted: the mesh that distconv.init gave for it, called"
            f" with these ranks= on every rank"
        )
    return make_mesh(parsed, ranks=ranks, device_type=mesh.device_type)


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh, ascending."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return sorted(ranks)


def whole_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The process group of all ranks of one of our meshes. RuntimeError where its job has ended."""
    if mesh.size() > 1 and _groups[mesh][1] is not dist.group.WORLD:
        raise RuntimeError(
            "a mesh whose process group the program has destroyed; accepted: a new one of distconv.init, and"
            " distconv.parallelize for each model again"
            if not _is_forked
            else "a sharded tensor in a process that a rank has forked, such as a worker of a DataLoader, which cannot"
            " communicate with the other ranks; accepted: whole tensors there"
        )
    return _groups[mesh][0]


def end_in_child() -> bool:
    """Ends all meshes in a process that was just forked; False where there were none of several ranks."""
    global _is_forked
    _groups.update(dict.fromkeys(_groups, (_ENDED, _ENDED)))
    _is_forked = any(mesh.size() > 1 for mesh in _groups)
    return _is_forked


def _end(job: dist.ProcessGroup) -> None:
    for mesh in [mesh for mesh, (_, made_under) in _groups.items() if made_under is job]:
        _groups[mesh] = _ENDED, _ENDED
        if not lacks(ENDED_JOBS):  # plans and torch's caches keep the mesh
            mesh._get_root_mesh()._pg_registry.clear()
    for key in [key for key in _meshes if key[0] is job]:
        del _meshes[key]


hooks.after_jobs.append(_end)


def is_ours(mesh: DeviceMesh) -> bool:
    """Whether distconv made or adopted this mesh."""
    return mesh in _groups


def is_the_programs(x: Tensor) -> bool:
    """Whether a tensor is a DTensor of the program's own, on a mesh that is not distconv's."""
    return isinstance(x, DTensor) and not is_ours(x.device_mesh)


def splits_channels(mesh: DeviceMesh) -> bool:
    """Whether the mesh has more than one rank along the axes that shard channels."""
    names = axis_names(mesh)
    return math.prod(mesh.size(axis) for axis, name in enumerate(names) if shards_channels(name)) > 1


def placements(mesh: DeviceMesh, ndim: int, beside: int = 0) -> tuple[Placement, ...]:
    """The layout on the mesh of a tensor (N, C, spatial...) of ``ndim`` dims.

    One that comes with tensors of up to ``beside`` dims is replicated along spatial axes that only these have.

    Tensors without spatial dims (fewer than 3 dims) are replicated along the spatial axes, those without channels along
    the channel axes too, scalars along all. Along an axis of one rank every tensor is replicated, so that no rule gets
    a ``Shard`` that cuts nothing.
    ValueError for a spatial axis of more than one rank that 3-dim or larger tensors of this size do not have.
    """
    return _placements(axis_names(mesh), tuple(mesh.shape), ndim, beside)


PARTLY = (
    "; or a strategy that gives {name} only to the modules whose data have it, such as"
    ' [layers] "backbone" = "{name}={size}" and "*" = "{other}={size}"'
)
"""The accepted strategy for a model that first computes data without the dim, such as points in space."""


@functools.lru_cache(maxsize=1024)
def _placements(names: tuple[str, ...], sizes: tuple[int, ...], ndim: int, beside: int = 0) -> tuple[Placement, ...]:
    result: list[Placement] = []
    for name, size in zip(names, sizes, strict=True):
        dim = AXES[name].dim_of(ndim)
        if dim is None and ndim >= 3 and size > 1 and AXES[name].dim_of(beside) is None:
            accepted = [axis.name for axis in AXES.values() if axis.dim_of(ndim) is not None]
            raise ValueError(
                f"partition axis {name}={size}: {ndim - 2}-D data (N, C, {ndim - 2} spatial dims) has no {name};"
                f" accepted: {', '.join(accepted)}{PARTLY.format(name=name, size=size, other=accepted[0])}"
            )
        result.append(Replicate() if dim is None or size == 1 else Shard(dim))
    return tuple(result)


def sharded_dims(mesh: DeviceMesh, placements: Sequence[Placement]) -> Iterator[tuple[int, int]]:
    """(mesh axis, tensor dim) for every ``Shard`` placement, in the order of the mesh axes."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            yield axis, placement.dim


batch_norm_statistics: dict[DeviceMesh, str] = {}
"""Per mesh in use: batch norm's statistics are over the "global" batch, or over each rank's "local" share."""


channel_algorithms: dict[DeviceMesh, str] = {}
"""Per mesh: which of distconv.settings.channels.ALGORITHMS shards the weights of its layers."""


uncompared: set[DeviceMesh] = set()  # The meshes of parts in turn, which are compared elsewhere.


def is_compared(mesh: DeviceMesh) -> bool:
    """Whether checksums of what must be the same on the ranks of a mesh are compared."""
    return mesh.size() > 1 and mesh not in uncompared and settings.value("check") == "on"


def channel_algorithm(mesh: DeviceMesh) -> str:
    """The algorithm of a mesh: the one it was given, else, from its first use on, what the job's setting says then."""
    if mesh not in channel_algorithms:
        channel_algorithms[mesh] = settings.value("channel_algorithm")
    return channel_algorithms[mesh]
