from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Norm = Literal["batch", "group"]


def _convolution(inputs: int, outputs: int, norm: Norm, groups: int) -> nn.Sequential:
    normalization = nn.BatchNorm3d(outputs) if norm == "batch" else nn.GroupNorm(groups, outputs)
    return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), normalization, nn.ReLU(inplace=True))


class UNet3d(nn.Module):
    """The 3-D U-Net (Çiçek et al., arXiv:1606.06650, 2016), with padded convolutions.

    Takes (N, channels, D, H, W), gives class scores (N, classes, D, H, W); D, H and W are multiples of
    2 ** (levels - 1).

    width: channels of the first convolution; each level doubles them before it is pooled.
    norm: "batch", or "group" with `groups` groups, which divide width.
    """

    def __init__(
        self,
        channels: int = 1,
        classes: int = 3,
        width: int = 32,
        levels: int = 4,
        norm: Norm = "batch",
        groups: int = 4,
    ) -> None:
        super().__init__()
        if levels < 1:
            raise ValueError(f"levels of a U-Net: {levels}, not at least 1")
        if norm not in ("batch", "group"):
            raise ValueError(f"norm of a U-Net: {norm!r}, not 'batch' or 'group'")
        self.pool = nn.MaxPool3d(2)
        self.analysis = nn.ModuleList()
        for level in range(levels):
            outputs = width * 2**level
            self.analysis.append(
                nn.Sequential(
                    _convolution(channels, outputs, norm, groups), _convolution(outputs, 2 * outputs, norm, groups)
                )
            )
            channels = 2 * outputs
        self.up = nn.ModuleList()
        self.synthesis = nn.ModuleList()
        for level in reversed(range(levels - 1)):
            skip = 2 * width * 2**level
            self.up.append(nn.ConvTranspose3d(channels, channels, 2, stride=2))
            self.synthesis.append(
                nn.Sequential(_convolution(channels + skip, skip, norm, groups), _convolution(skip, skip, norm, groups))
            )
            channels = skip
        self.head = nn.Conv3d(channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.analysis):
            if level:
                skips.append(x)
                x = self.pool(x)
            x = block(x)
        for up, block in zip(self.up, self.synthesis, strict=True):
            x = block(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)
