"""Convolutions whose channels are sharded: the bytes that each algorithm sends, beside its formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import distconv
from distconv.settings.channels import ChannelMap, weight_dims

Step = Callable[[], object]

BATCH, KERNEL = 4, 3
LAYERS = ((64, 256, 28), (256, 64, 28), (256, 256, 14))
"""Channels, filters, rows and columns."""

RUNS = {
    2: (("channel=2", "x"), ("channel=2", "y"), ("channel=2", "auto")),
    4: (("channel=4", "x"), ("channel=4", "y"), ("channel=2,filter=2", "w"), ("channel=4", "auto")),
}
"""By ranks: partition and algorithm."""


@dataclass(frozen=True)
class Convolution:
    """Forward and backward of one layer with its weight and channels in shards, all gradients wanted."""

    x: Tensor
    weight: Tensor
    grad: Tensor

    def __call__(self) -> object:
        y = F.conv2d(self.x, self.weight, padding=KERNEL // 2)
        return torch.autograd.grad(y, (self.x, self.weight), self.grad)


def plain(channels: int, filters: int, size: int) -> Convolution:
    """In one process."""
    x, weight = torch.randn(BATCH, channels, size, size), torch.randn(filters, channels, KERNEL, KERNEL)
    return Convolution(x.requires_grad_(), weight.requires_grad_(), torch.randn(BATCH, filters, size, size))


def sharded(channels: int, filters: int, size: int, mesh: DeviceMesh, algorithm: str) -> Convolution:
    """The same on a mesh with channel axes only, the weight in the blocks of the algorithm."""
    whole = plain(channels, filters, size)
    axes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    dims = weight_dims(ChannelMap(channels, filters), algorithm, axes)
    weight = distribute_tensor(whole.weight.detach(), mesh, [Shard(dim) for dim in dims])
    x, grad = (distconv.shard(tensor.detach(), mesh).detach() for tensor in (whole.x, whole.grad))
    return Convolution(x.requires_grad_(), weight.requires_grad_(), grad)


def formula(algorithm: str, channels: int, filters: int, size: int, ranks: int) -> float:
    """Bytes that all ranks together send in a step, gradients' allreduces left out.

    x adds up y and gathers dL/dy; y gathers x, in backward once more, and adds up dL/dx; w on a square grid does both,
    x over one axis. There y changes sides: of F / sqrt(p) filters a rank on the diagonal keeps F / p, the others none.
    """
    position = BATCH * size * size * 4
    side = ranks**0.5
    x, y = (ranks - 1) * channels * position, (ranks - 1) * filters * position
    if algorithm == "auto":
        return min(3 * x, 2 * y)
    if algorithm == "w":
        return 3 * (side - 1) * channels * position + 2 * (side - 1 / side) * filters * position
    return 2 * y if algorithm == "x" else 3 * x


def moved(recorded: Callable[[Step], int]) -> Iterator[dict[str, object]]:
    """Bytes sent per layer, partition and algorithm; ``recorded`` counts those of this rank in a step."""
    for partition, algorithm in RUNS[dist.get_world_size()]:
        mesh = distconv.init(partition)
        for layer in LAYERS:
            mine = torch.tensor(recorded(sharded(*layer, mesh, algorithm)))
            dist.all_reduce(mine)
            expected = formula(algorithm, *layer, dist.get_world_size())
            yield {
                "layer": layer,
                "partition": partition,
                "algorithm": algorithm,
                "sent": int(mine),
                "formula": expected,
            }
