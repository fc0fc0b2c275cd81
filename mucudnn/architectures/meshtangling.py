from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class MeshTangling(nn.Module):
    """A fully convolutional network for very large 2-D samples, after Dryden et al. (IPDPS 2019).

    Takes (N, channels, H, W), gives class scores per cell (N, classes, H / 2**b, W / 2**b) for b blocks, rounded up.
    Each block is a run of convolution, batch norm and ReLU; its first convolution has stride 2. The first
    convolution of the network is 5x5, all others 3x3. Their 1k model has blocks of three, their 2k model of five.
    They name the widths of the first (128) and the last two blocks (384, 128); those between are ours.
    """

    def __init__(
        self,
        channels: int = 18,
        classes: int = 2,
        widths: Sequence[int] = (128, 192, 256, 320, 384, 128),
        per_block: int = 3,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for block, outputs in enumerate(widths):
            for index in range(per_block):
                kernel = 5 if block == index == 0 else 3
                stride = 2 if index == 0 else 1
                layers += [
                    nn.Conv2d(channels, outputs, kernel, stride=stride, padding=kernel // 2, bias=False),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(inplace=True),
                ]
                channels = outputs
        self.features = nn.Sequential(*layers)
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
