from __future__ import annotations

from torch import Tensor, nn


class VGG16(nn.Module):
    """VGG-16, configuration D (Simonyan and Zisserman, arXiv:1409.1556, 2014, table 1).

    Takes (N, 3, H, W), gives (N, classes).

    width: filters of the first group of convolutions; the later groups have 2, 4, 8 and 8 times as many.
    pooled: side of the square that the features are averaged to before the linear layers.
    """

    def __init__(
        self, classes: int = 1000, width: int = 64, pooled: int = 7, hidden: int = 4096, dropout: float = 0.5
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for convolutions, factor in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = factor * width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = nn.Sequential(
            nn.Linear(channels * pooled**2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))
