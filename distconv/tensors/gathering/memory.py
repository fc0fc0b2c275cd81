"""The memory that a rank may still allocate."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distconv.tensors.mesh import whole_group

_CONTAINER, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

_SECOND = "memory.max", "memory.current", "inactive_file"
_FIRST = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""Files with the limit and the use of control groups of versions 2 and 1, and what memory.stat calls files not used."""


def free_on_host(mesh: DeviceMesh) -> int:
    """Bytes of main memory for this rank, the same share for each rank of its machine. Collective."""
    names: list[str] = [""] * mesh.size()
    dist.all_gather_object(names, socket.gethostname(), group=whole_group(mesh))
    return _of_host() // names.count(socket.gethostname())


def _of_host() -> int:
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    return max(0, min(free, *_of_containers(), _of_process()))


def _of_containers() -> list[int]:
    """What the control groups of this process leave, those within which they are included."""
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
        versions = {"": (_CONTAINER, *_SECOND), "memory": (_CONTAINER / "memory", *_FIRST)}
        return [
            left
            for _, controllers, own in lines
            for controller in set(controllers.split(",")) & set(versions)
            for left in _of_groups(own.strip("/"), *versions[controller])
        ]
    return []


def _of_groups(own: str, root: Path, *files: str) -> list[int]:
    """What a group and those around it leave. In a container, ``own`` may be a name that only its host has."""
    groups = [root / own, *(root / own).parents]
    return [left for group in groups if group.is_relative_to(root) for left in _of_container(group, *files)]


def _of_container(group: Path, limit: str, used: str, dropped: str) -> list[int]:
    with contextlib.suppress(OSError, ValueError):  # a container without a limit says "max"
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Files that were read are dropped where memory is asked for.
        return [int((group / limit).read_text()) - int((group / used).read_text()) + int(counts[dropped])]
    return []


def maps_are_limited() -> bool:
    """Whether it is limited what the process may map (`ulimit -v`)."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _of_process() -> int:
    """The bytes that the process may still map."""
    if not maps_are_limited():
        return sys.maxsize
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return resource.getrlimit(resource.RLIMIT_AS)[0] - mapped


def free_here(device_type: str) -> int:
    """Bytes that this process may take on a device."""
    if device_type == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return _of_host()


def free_everywhere(mesh: DeviceMesh) -> int:
    """Bytes that every rank of a mesh may take on the mesh's device: those of the rank that has least. Collective."""
    on_gpu = mesh.device_type == "cuda" and torch.cuda.is_available()
    free = free_here("cuda") if on_gpu else free_on_host(mesh)
    least = torch.tensor(free, device=mesh.device_type)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=whole_group(mesh))
    return int(least.item())
