"""Gradients of parameters that a model takes within its forward, while it runs in parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import distconv


class Adapting(nn.Module):
    """Computes with weights that one step on its own loss has changed.

    ``of_input``: whether the loss is one of the input, of which each part has its own; else of a constant.
    """

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.of_input = of_input

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x if self.of_input else torch.ones(1, 2, 6, 6, dtype=x.dtype)
            (gradient,) = torch.autograd.grad(self.first(given).square().mean(), self.first.weight)
        weight = self.first.weight - 0.1 * gradient.detach()
        return self.last(nn.functional.conv2d(x, weight, self.first.bias, padding=1))


@pytest.mark.parametrize("of_input", [True, False])
@pytest.mark.parametrize("parts", ["height=2", "sample=2"])
def test_gradients_within_forward_are_those_of_one_process(parts: str, of_input: bool) -> None:
    torch.manual_seed(0)
    plain, x = Adapting(of_input).double(), torch.randn(2, 2, 16, 12, dtype=torch.float64)
    model = distconv.in_turn(copy.deepcopy(plain), parts)
    for each in (plain, model):
        each(x).square().mean().backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-10, atol=1e-12)


class Cut(nn.Module):
    """Begins a graph of its own at some values, and keeps these."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach()
        cut, twice, unused = (y.clone().requires_grad_() for _ in range(3))
        one = torch.ones(4, 1, 1, dtype=x.dtype).requires_grad_()
        with torch.enable_grad():
            twice.square().sum().backward()
        self.kept = {"cut": cut, "one": one, "twice": twice, "unused": unused}
        return self.last(cut * one + twice)


@pytest.mark.parametrize("parts", ["height=2", "sample=2"])
def test_values_at_which_forward_begins_a_graph_have_the_gradients_of_one_process(parts: str) -> None:
    torch.manual_seed(0)
    plain, x = Cut().double(), torch.randn(2, 2, 16, 12, dtype=torch.float64)
    model = distconv.in_turn(copy.deepcopy(plain), parts)
    for step in range(2):
        hooked: list[float] = []
        y, expected = model(x), plain(x)
        torch.testing.assert_close(model.kept["twice"].grad, plain.kept["twice"].grad, rtol=1e-10, atol=1e-12)
        for each, result in ((model, y), (plain, expected)):
            each.kept["cut"].register_hook(lambda grad, hooked=hooked: hooked.append(grad.sum().item()))
            (result.square().mean() + each.kept["cut"].sum() * step).backward()
        assert hooked[0] == pytest.approx(hooked[1], rel=1e-10)
        for name, own in model.kept.items():
            assert own.is_leaf and type(own) is Tensor
            torch.testing.assert_close(own.grad, plain.kept[name].grad, rtol=1e-10, atol=1e-12)
    (own,) = torch.autograd.grad(model(x).sum(), model.kept["cut"])
    (other,) = torch.autograd.grad(plain(x).sum(), plain.kept["cut"])
    torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)
