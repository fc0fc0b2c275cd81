from __future__ import annotations

from torch import Tensor, nn


class CosmoFlow(nn.Module):
    """CosmoFlow (Mathuriya et al., SC 2018) as scaled to larger cubes by Oyama et al. (arXiv:2007.12856, 2020).

    Takes (N, channels, size, size, size), gives (N, parameters) in (-1.2, 1.2). Seven convolutions, the fourth with
    stride 2; as many of them, from the first, are followed by an average pooling as reduce the cube to 2 voxels a
    side: five at 128, seven at 512. So the number of parameters is that of the paper, 9.44 million, at every size.

    width: filters of the first convolution; they double up to 16 times that.
    batch_norm: normalise after each convolution, as their second variant does.

    Raises ValueError where size is not a power of two from 8 to 512.
    """

    def __init__(
        self,
        size: int = 128,
        channels: int = 4,
        parameters: int = 4,
        width: int = 16,
        hidden: tuple[int, int] = (2048, 256),
        dropout: float = 0.5,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if not 8 <= size <= 512 or size & (size - 1):
            raise ValueError(f"size of a CosmoFlow cube: {size}, not a power of two from 8 to 512")
        poolings = size.bit_length() - 3
        layers: list[nn.Module] = []
        for index in range(7):
            outputs = width * 2 ** min(index, 4)
            stride = 2 if index == 3 else 1
            layers.append(nn.Conv3d(channels, outputs, 3, stride=stride, padding=1, bias=not batch_norm))
            if batch_norm:
                layers.append(nn.BatchNorm3d(outputs))
            layers.append(nn.LeakyReLU(0.3))
            if index < poolings:
                layers.append(nn.AvgPool3d(3, stride=2, padding=1))
            channels = outputs
        self.features = nn.Sequential(*layers)
        self.regressor = nn.Sequential(
            nn.Linear(channels * 2**3, hidden[0]),
            nn.LeakyReLU(0.3),
            nn.Dropout(dropout),
            nn.Linear(hidden[0], hidden[1]),
            nn.LeakyReLU(0.3),
            nn.Dropout(dropout),
            nn.Linear(hidden[1], parameters),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return 1.2 * self.regressor(self.features(x).flatten(1))
