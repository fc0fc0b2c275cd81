"""Programs of the first hour of live planning, and networks in which it has next to nothing to gain."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.networks import NETWORKS
from benchmarks.planning.drawn import DRAWS, Made, drawn, same


@dataclass(frozen=True)
class Program:
    """What is trained: makes the model and its images, for so many steps."""

    make: Callable[[], Made]
    steps: int


SIZES = 200
"""Different sizes among the changing shapes."""


def slices() -> Made:
    """The network of benchmarks/demo/brain_slices.py with made-up slices."""
    width, kernel = 12, 31

    def block(inputs: int, side: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, width, side, padding=side // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU())

    layers = [block(1, 3), block(width, 3), block(width, kernel), block(width, kernel), block(width, 3)]
    return nn.Sequential(*layers, nn.Conv2d(width, 3, 1)), same(torch.randn(8, 1, 64, 64))


def shapes() -> Made:
    """Seven layers of 3x3, and images of `SIZES` sizes."""
    channels = 3, *[24] * 7
    pairs = itertools.pairwise(channels)
    layers = [layer for a, b in pairs for layer in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(4, 3, 24 + step % SIZES // 8, 24 + step % 8) for step in range(10**6))


def network(name: str, batch: int) -> Callable[[], Made]:
    found = NETWORKS[name]
    return lambda: (found.build(), same(torch.randn(batch, *found.input_shape)))


def long_kernel() -> Made:
    return nn.Conv1d(8, 8, 1024, padding=512), same(torch.randn(2, 8, 16000))


def depthwise_volume() -> Made:
    return nn.Conv3d(32, 32, 5, padding=2, groups=32), same(torch.randn(1, 32, 32, 32, 32, requires_grad=True))


def blur() -> Made:
    """A wide blur of images in float64, each channel by itself."""
    layer = nn.Conv2d(3, 3, 61, padding=30, groups=3, bias=False).double()
    return layer, same(torch.randn(1, 3, 128, 128, dtype=torch.float64))


def volume() -> Made:
    """The 3-D U-Net on a volume of an eighth of the usual size."""
    found = NETWORKS["unet3d"]
    channels, *sides = found.input_shape
    return found.build(), same(torch.randn(1, channels, *(side // 2 for side in sides)))


DRAWN = {f"{'U-Net' if seed % 2 else 'residual'} {seed}": Program(partial(drawn, seed), 50) for seed in range(DRAWS)}
HOUR = {
    "long kernel, 1-D": Program(long_kernel, 12),
    "depthwise 5x5x5": Program(depthwise_volume, 12),
    "blur, float64": Program(blur, 12),
    "slices": Program(slices, 10),
    "resnet18": Program(network("resnet18", 2), 10),
    "vgg16": Program(network("vgg16", 1), 5),
    "unet3d": Program(volume, 5),
    "shapes": Program(shapes, 100),
    "alexnet": Program(network("alexnet", 4), 10),
    "wide resnet50": Program(network("wide_resnet50", 1), 5),
}
"""Programs of the first hour, each run three times."""
