"""What benchmarks/distributed/distributed.py runs: a module, its input, and how 2 and 4 ranks share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from benchmarks.demo.unet3d import UNet3d
from distconv.settings.partition import AXES, Partition
from mucudnn.architectures.resnet import ResNet


@dataclass(frozen=True)
class Case:
    """Forward and backward of a module on one sample.

    shape: of the input (N, C, spatial...). partitions: {ranks: partition}. input_gradient: backward reaches the input.
    compiled: measured by torch.compile, too.
    """

    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    partitions: dict[int, str]
    input_gradient: bool = True
    compiled: bool = False

    def parts(self, ranks: int) -> tuple[int, ...]:
        """Into how many parts each dim of the input is cut."""
        parts = [1] * len(self.shape)
        for name, count in Partition.parse(self.partitions[ranks]).axes:
            dim = AXES[name].dim_of(len(self.shape))
            assert dim is not None, f"{self.title}: its input has no {name}"
            parts[dim] = count
        return tuple(parts)

    def slab(self, ranks: int) -> tuple[int, ...]:
        """Shape of one rank's share of the input."""
        return tuple(extent // parts for extent, parts in zip(self.shape, self.parts(ranks), strict=True))


HEIGHT = {2: "height=2", 4: "height=4"}

CASES = {
    "conv": Case("conv2d, 32 channels 512²", lambda: nn.Conv2d(32, 32, 3, padding=1), (1, 32, 512, 512), HEIGHT),
    "conv-small": Case(
        "conv2d, 16 channels 64²", lambda: nn.Conv2d(16, 16, 3, padding=1), (1, 16, 64, 64), HEIGHT, compiled=True
    ),
    "block": Case(
        "ResNet-18 block, 64 channels 56²", lambda: ResNet(18).stages[0], (1, 64, 56, 56), HEIGHT, compiled=True
    ),
    "unet": Case(
        "3-D U-Net, width 16, 64³",
        lambda: UNet3d(width=16),
        (1, 1, 64, 64, 64),
        {2: "depth=2", 4: "depth=2,height=2"},
        input_gradient=False,
    ),
}
