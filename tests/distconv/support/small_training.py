"""A small network and the batches that it is trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def net() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1)]
    return nn.Sequential(*layers).double()


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return [
        (
            torch.randn(5, 2, 9, 8, generator=generator, dtype=torch.float64),
            torch.randn(5, 4, 9, 8, generator=generator, dtype=torch.float64),
        )
        for _ in range(count)
    ]


Result = list[Any]
