"""The memory that a rank may still allocate."""

from __future__ import annotations

import contextlib
import socket
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
    with contextlib.suppress(OSError, ValueError):  # a container without a limit says "max"
        limit, used = (int((_CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, max(limit - used, 0))
    return free


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
