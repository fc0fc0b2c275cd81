from __future__ import annotations

from torch import Tensor, nn


class AlexNet(nn.Module):
    """AlexNet in its single-tower form (Krizhevsky, "One weird trick", arXiv:1404.5997, 2014).

    Takes (N, 3, H, W), gives (N, classes). At 224x224 its second convolution is 5x5, 64 to 192 channels, on 27x27.

    width: filters of the first convolution; the others keep their ratio to it.
    pooled: side of the square that the features are averaged to before the linear layers.
    """

    def __init__(
        self, classes: int = 1000, width: int = 64, pooled: int = 6, hidden: int = 4096, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(width, 3 * width, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(3 * width, 6 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(6 * width, 4 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.pool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(4 * width * pooled**2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))
