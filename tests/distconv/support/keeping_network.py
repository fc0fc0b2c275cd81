"""A model that keeps what it has computed in attributes, as detectors keep their strides; without distconv."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Keeps(nn.Module):
    """Two convolutions; the features between them stay in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        self.kept = {"features": [y.detach()], "size": y.mean((0, 2, 3)).detach()}
        return self.last(y)
