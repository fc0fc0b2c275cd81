"""Numbers that a model draws from generators of its own are those of plain torch within a limit of memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distconv.fitting.ways import AGAIN, AWAY
from distconv.turns.turning import turn
from tests.distconv.fitting.test_changed_state import OneWay

GLOBAL = torch.Generator()


def uniform(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.rand(x.shape, generator=generator, dtype=x.dtype)


KINDS: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "torch's": lambda: uniform(torch.Generator().manual_seed(1)),
    "torch's, in a global variable": lambda: uniform(GLOBAL.manual_seed(1)),
    "torch's, in place": lambda: (lambda g: lambda x: torch.empty_like(x).uniform_(generator=g))(
        torch.Generator().manual_seed(1)
    ),
    "NumPy's": lambda: (lambda g: lambda _: g.random())(np.random.default_rng(1)),
    "NumPy's method": lambda: (lambda draw: lambda _: draw())(np.random.RandomState(1).rand),
    "Python's": lambda: (lambda g: lambda _: g.random())(random.Random(1)),
    "Python's method": lambda: (lambda draw: lambda _: draw())(random.Random(1).random),
}


class Noisy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.draw = nn.Conv2d(8, 8, 3, padding=1), KINDS[kind]()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x))
        return torch.sigmoid(y * self.draw(x)) * y


class Net(nn.Module):
    """The blocks at the ends draw; those between may be computed again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        between = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(3))
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 1), Noisy(kind), *between, Noisy(kind))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def gradients(kind: str, within: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    """Losses and gradients of two steps."""
    torch.manual_seed(0)
    net, x = within(Net(kind).double()), torch.randn(2, 3, 48, 32, dtype=torch.float64)
    found = []
    for _ in range(2):
        loss = net(x).square().mean()
        found += [loss.detach(), *torch.autograd.grad(loss, [*net.parameters()])]
    return found


@pytest.mark.parametrize("how", [AGAIN, AWAY, "parts"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_drawn_once(kind: str, how: str) -> None:
    expected = gradients(kind, lambda net: net)
    found = gradients(kind, lambda net: turn(net, (OneWay(how), None), None, "distconv.fit"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
