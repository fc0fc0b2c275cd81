"""Drawn networks: residual networks and U-Nets of ordinary layers, in which mucudnn has next to nothing to gain."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional

DRAWS = 10
Made = tuple[nn.Module, Iterator[Tensor]]
"""A network, and its images for ever."""


class _Residual(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.shortcut = nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(y)) + self.shortcut(x))


class _Twice(nn.Sequential):
    def __init__(self, inputs: int, width: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, width):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        super().__init__(*layers)


class _UNet(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.down = nn.ModuleList(_Twice(a, b) for a, b in zip([3, *widths], widths, strict=False))
        pairs = list(zip(reversed(widths[1:]), reversed(widths[:-1]), strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(_Twice(2 * b, b) for _, b in pairs)
        self.last = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.down):
            x = block(x if not number else functional.max_pool2d(x, 2))
            kept.append(x)
        for grow, up, beside in zip(self.grow, self.up, reversed(kept[:-1]), strict=True):
            x = up(torch.cat([grow(x), beside], 1))
        return self.last(x)


def same(x: Tensor) -> Iterator[Tensor]:
    while True:
        yield x


def drawn(seed: int) -> Made:
    """A network and its images: residual for an even seed, a U-Net for an odd one."""
    draw = Random(seed)
    batch, side = draw.choice([4, 8]), draw.choice([48, 64])
    width, levels = draw.choice([24, 32]), draw.choice([3, 4])
    widths = [width << level for level in range(levels)]
    x = torch.randn(batch, 3, side, side)
    if seed % 2:
        return _UNet(widths), same(x)
    blocks: list[nn.Module] = [nn.Conv2d(3, width, draw.choice([3, 7]), padding="same")]
    for inputs, outputs in zip([width, *widths], widths, strict=False):
        blocks += [_Residual(inputs, outputs, 1 if inputs == outputs else 2)]
        blocks += [_Residual(outputs, outputs, 1) for _ in range(draw.choice([0, 1]))]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)), same(x)
