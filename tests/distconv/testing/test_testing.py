"""The plugin of pytest, as a program's own tests use it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Network(nn.Module):
    """One with a norm's buffers, random numbers, and a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.dropout(self.norm(self.first(x)).relu(), 0.2, self.training)
        return {"sum": x.sum(), "map": self.last(x)}


class KnowsItsProgram(nn.Conv2d):
    """One that computes something else in the program that its ranks run."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if Path(sys.argv[0]).name == "step.py" else 1)


def test_a_model_is_the_same_on_ranks(assert_same_on_ranks) -> None:
    assert_same_on_ranks(Network(), torch.randn(2, 1, 8, 8, requires_grad=True), partition="height=2")


def test_what_differs_is_reported(assert_same_on_ranks) -> None:
    with pytest.raises(AssertionError, match="output 0: Tensor-likes are not close"):
        assert_same_on_ranks(KnowsItsProgram(1, 1, 3), torch.randn(1, 1, 8, 8), partition="height=2", backward=False)


def test_a_partition_that_is_not_accepted_is_reported(assert_same_on_ranks) -> None:
    with pytest.raises(ValueError, match="did you mean height"):
        assert_same_on_ranks(Network(), torch.randn(2, 1, 8, 8), partition="heigth=2")
