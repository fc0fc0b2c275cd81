"""ShardTensor of NVIDIA's PhysicsNeMo: a plain module, called with a sharded input.

Its documentation leaves the parameters as they are: a plain parameter that meets a sharded input counts as replicated,
and its gradient is summed over the mesh in the backward pass. The package registers its sharded layers when it is
imported where there is a GPU; elsewhere the arm calls the function that does so, `register_custom_ops`. What has no
rule of ShardTensor's falls to DTensor's, so DTensor's refusals are its refusals, too.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from physicsnemo import domain_parallel
from physicsnemo.domain_parallel import ShardTensor
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from benchmarks.conformance.cases import cut_dims
from benchmarks.conformance.dtensor_arm import mesh_of, refused

__all__ = ["WAYS", "begin", "compute", "refused", "versions"]

WAYS = ("",)

if not torch.cuda.is_available():
    domain_parallel.register_custom_ops()  # once, before ranks are forked: what it imports takes seconds


def versions() -> dict[str, str]:
    return {"physicsnemo": version("nvidia-physicsnemo"), "torch": torch.__version__}


def begin() -> None:
    pass


def compute(module: nn.Module, x: Tensor, grad: Tensor, partition: str, way: str) -> dict[str, Tensor | None]:
    mesh = mesh_of(partition)
    dims = list(cut_dims(partition, x.dim()).values())
    local = x
    for axis, dim in enumerate(dims):
        local = local.chunk(mesh.size(axis), dim)[mesh.get_local_rank(axis)]
    placements = [Shard(dim) for dim in dims]
    sharded = ShardTensor.from_local(local.contiguous(), mesh, placements, "chunk", x.shape)
    given = sharded.detach().requires_grad_()
    y = module(given).full_tensor()
    y.backward(grad)
    gradients = {name: _whole(parameter.grad) for name, parameter in module.named_parameters()}
    return {"output": y, "input": _whole(given.grad), **gradients}


def _whole(x: Tensor | None) -> Tensor | None:
    return x.full_tensor() if isinstance(x, (ShardTensor, DTensor)) else x
