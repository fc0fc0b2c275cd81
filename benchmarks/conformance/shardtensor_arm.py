"""PhysicsNeMo's ShardTensor: `scatter_tensor` of the input, and the module as it is, whose parameters it promotes."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from importlib.metadata import version

import torch
import torch.distributed as dist
from physicsnemo.distributed import DistributedManager
from physicsnemo.domain_parallel import ShardTensor, scatter_tensor
from physicsnemo.domain_parallel.shard_utils.patch_core import MissingShardPatch, UndeterminedShardingError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.conformance.cases import cut_dims, parts

WAYS = ("",)


def versions() -> dict[str, str]:
    return {"physicsnemo": version("nvidia-physicsnemo"), "torch": torch.__version__}


def begin() -> None:
    """Starts the library's own process group in place of the one that is there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port = [0]
    if rank == 0:
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port[0], "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in where.items()})
    DistributedManager.initialize()


@functools.cache
def mesh_of(partition: str) -> DeviceMesh:
    counts = parts(partition)
    return DistributedManager().initialize_mesh(tuple(counts.values()), tuple(counts))


def compute(module: nn.Module, x: Tensor, grad: Tensor, partition: str, way: str) -> dict[str, Tensor | None]:
    mesh = mesh_of(partition)
    placements = tuple(Shard(dim) for dim in cut_dims(partition, x.dim()).values())
    given = scatter_tensor(x, 0, mesh, placements, requires_grad=True)
    y = module(given).full_tensor()
    y.backward(grad)
    gradients = {name: _whole(parameter.grad) for name, parameter in module.named_parameters()}
    return {"output": y, "input": _whole(given.grad), **gradients}


def _whole(x: Tensor | None) -> Tensor | None:
    return x.full_tensor() if isinstance(x, ShardTensor | DTensor) else x


def refused(error: Exception) -> bool:
    return isinstance(error, MissingShardPatch | UndeterminedShardingError | NotImplementedError)
