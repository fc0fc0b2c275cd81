"""torch's DTensor: `distribute_tensor` of the input, `distribute_module` of the layer.

Parameters are replicated, as `distribute_module` does by default. Where a partition cuts channels there is a second way
that tensor parallelism uses: parameters that have the input's channels are cut as it is, by a ``partition_fn``.
"""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from benchmarks.conformance.cases import cut_dims, parts

WAYS = ("", "channel")
"""Parameters replicated; cut along channels."""

REFUSALS = re.compile(
    r"not supported|unsupported|not implemented|does not support|not have a sharding strategy"
    r"|Sharding propagation failed|cannot unflatten"
    r"|(must|should) be .* for tensor parallel convolution|It requires that",
    re.IGNORECASE,
)


def versions() -> dict[str, str]:
    return {"torch": torch.__version__}


def begin() -> None:
    pass


@functools.cache
def mesh_of(partition: str) -> DeviceMesh:
    counts = parts(partition)
    return init_device_mesh("cpu", tuple(counts.values()), mesh_dim_names=tuple(counts))


def compute(module: nn.Module, x: Tensor, grad: Tensor, partition: str, way: str) -> dict[str, Tensor | None]:
    mesh = mesh_of(partition)
    model = distribute_module(module, mesh, _cut_channels if way == "channel" else None)
    placements = [Shard(dim) for dim in cut_dims(partition, x.dim()).values()]
    given = distribute_tensor(x, mesh, placements).requires_grad_()
    y = model(given).full_tensor()
    y.backward(grad)
    gradients = {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}
    return {"output": y, "input": _whole(given.grad), **gradients}


def _whole(x: Tensor | None) -> Tensor | None:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _cut_channels(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for own, parameter in module.named_parameters(recurse=False):
        dim = _channel_dim(module, own)
        if dim is not None:
            names = mesh.mesh_dim_names or ()
            placements = [Shard(dim) if axis == "channel" else Replicate() for axis in names]
            module.register_parameter(own, nn.Parameter(distribute_tensor(parameter, mesh, placements)))


def _channel_dim(module: nn.Module, parameter: str) -> int | None:
    """Which dim of a layer's parameter goes with the channels of its input."""
    if isinstance(module, _ConvNd):
        if module.groups > 1 or isinstance(module, _ConvTransposeNd):
            return 0 if parameter == "weight" or module.groups > 1 else None
        return 1 if parameter == "weight" else None
    return 0 if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d)) else None


def refused(error: Exception) -> bool:
    """Whether an error, or what it was raised from, tells of something that is not there."""
    told: BaseException | None = error
    while told is not None:
        if isinstance(told, NotImplementedError) or REFUSALS.search(str(told)):
            return True
        told = told.__cause__
    return False
