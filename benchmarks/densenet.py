"""The DenseNet for CIFAR: many narrow convolutions of 3x3, each of all channels before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _preactivated(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
    )


class _Dense(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.layer = _preactivated(inputs, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer(x)], 1)


class DenseNet(nn.Module):
    """The DenseNet for CIFAR without bottleneck or compression (Huang et al., arXiv:1608.06993, 2016).

    Takes (N, 3, H, W), gives (N, classes). Three dense blocks of (depth - 4) / 3 convolutions that add
    `growth` channels each.

    Raises ValueError where depth is not 4 more than a positive multiple of 3.
    """

    def __init__(self, depth: int = 40, growth: int = 12, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        if depth < 7 or (depth - 4) % 3:
            raise ValueError(f"depth of a DenseNet: {depth}, not 4 more than a positive multiple of 3")
        per_block = (depth - 4) // 3
        channels = width
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for block in range(3):
            for _ in range(per_block):
                layers.append(_Dense(channels, growth))
                channels += growth
            if block < 2:
                layers += [_preactivated(channels, channels, 1), nn.AvgPool2d(2)]
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))
