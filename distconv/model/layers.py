"""Layouts of a layer's parameters on a mesh whose axes shard channels."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from distconv.settings.channels import ChannelMap, weight_dims
from distconv.settings.partition import Partition, shards_channels

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PER_CHANNEL: Any = (nn.BatchNorm1d.__base__, nn.InstanceNorm1d.__base__, nn.GroupNorm, nn.PReLU)


def layer_of(module: nn.Module) -> ChannelMap | None:
    """The channels of a convolution or linear layer; None for any other module."""
    if isinstance(module, nn.Linear):
        return ChannelMap(module.in_features, module.out_features)
    if isinstance(module, TRANSPOSED):
        stride = float(math.prod(module.stride))
        return ChannelMap(module.in_channels, module.out_channels, module.groups, True, stride)
    if isinstance(module, CONVOLUTIONS):
        return ChannelMap(module.in_channels, module.out_channels, module.groups, scale=1 / math.prod(module.stride))
    return None


def parameter_placements(module: nn.Module, algorithm: str, partition: Partition) -> dict[str, tuple[Placement, ...]]:
    """The placements on the partition's axes of each parameter of a module itself (not of its children).

    A convolution's and a linear layer's weight by the algorithm, one of ALGORITHMS; their biases, and the parameters
    of batch, group and instance norms and of PReLU, as channels of y are owned. All other parameters are replicated, as
    are all of them along axes other than ``channel`` and ``filter``, and along axes of one rank.
    """
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    whole = (Replicate(),) * len(partition.axes)
    axes = {name: size for name, size in partition.axes if shards_channels(name) and size > 1}
    vector = tuple(Shard(0) if name in axes else Replicate() for name in partition.names)
    layer = layer_of(module)
    if layer is not None:
        dims = dict(zip(axes, weight_dims(layer, algorithm, axes), strict=True))
        weight = tuple(Shard(dims[name]) if name in dims else Replicate() for name in partition.names)
        return {name: {"weight": weight, "bias": vector}.get(name, whole) for name in own}
    if isinstance(module, PER_CHANNEL):
        return {name: vector if parameter.numel() > 1 else whole for name, parameter in own.items()}
    return dict.fromkeys(own, whole)
