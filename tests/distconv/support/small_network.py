"""A small network with all that a plan has to follow: convolutions, norms, a residual sum, pooling, a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SHAPE = (4, 3, 12, 12)
PARTITIONS = ("sample=4", "height=2,width=2", "sample=2,channel=2", "channel=4", "channel=2,filter=2")
STEPS = (*((text, "off") for text in PARTITIONS), *((text, "on") for text in ("height=4", *PARTITIONS[::2])))
"""Partitions, and whether parameters are sharded along all axes."""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.pool(self.relu(self.block(x) + x)).flatten(1))


def batch() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
