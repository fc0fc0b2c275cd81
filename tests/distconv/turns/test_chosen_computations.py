"""Calls of which a function chooses how they are computed, in parts or whole, as `distconv.fit` does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distconv.settings.partition import Partition
from distconv.turns.computation import Computation
from distconv.turns.turning import turn

WHOLE, PARTS = Computation(), Computation(Partition.parse("height=4"), 1500 << 10)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)
    return nn.Sequential(*layers).double().eval()


def computed(model: nn.Module, how: Computation) -> nn.Module:
    return turn(copy.deepcopy(model), (lambda *call: how, None), None, "a test")


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("how", [WHOLE, PARTS])
def test_what_a_checkpoint_computes_again_runs_as_it_did(how: Computation) -> None:
    plain = Checkpointed()
    model = computed(plain, how)
    x = torch.randn(1, 3, 96, 64, dtype=torch.float64)
    for each in (model, plain):
        each(x).square().mean().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-13)


def test_an_input_that_another_model_has_made_gets_its_gradient() -> None:
    first, plain = net(), net()
    second = computed(plain, PARTS)
    x = torch.randn(1, 3, 96, 64, dtype=torch.float64)
    gradients = [torch.autograd.grad(each(first(x)).square().sum(), first[0].weight)[0] for each in (second, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)
