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

_CONTAINER = Path("/sys/fs/cgroup")


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
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().strip("/")
        groups = [_CONTAINER / own, *(_CONTAINER / own).parents]
        return [left for group in groups if group.is_relative_to(_CONTAINER) for left in _of_container(group)]
    return []


def _of_container(group: Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError):  # a container without a limit says "max"
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return [
            limit - used + int(counts["inactive_file"])
        ]  # files that were read are dropped where memory is asked for
    return []


def _of_process() -> int:
    """What the process may still map (`ulimit -v`)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


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
