"""Gradients of convolutions that a program asks for itself, in a function of its own, beside stock torch in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

import distconv

aten = torch.ops.aten


class Signs(torch.autograd.Function):
    """A convolution with the signs of a weight, as binarized networks have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.conv2d(x, weight.sign(), padding=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = torch.nn.grad.conv2d_input(x.shape, weight.sign(), grad, padding=1)
        return dx, torch.nn.grad.conv2d_weight(x, weight.shape, grad, padding=1).clamp(-1, 1)


class Strided(torch.autograd.Function):
    """All gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.conv_transpose2d(x, weight, bias, stride=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        of = [2, 2], [0, 0], [1, 1], True, [0, 0], 1
        x, weight = ctx.saved_tensors
        dx, dw, db = aten.convolution_backward(grad, x, weight, [weight.shape[1]], *of, [True, True, True])
        return dx, 2 * dw, db


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.signs = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.up, self.bias = nn.Parameter(torch.randn(4, 3, 2, 2)), nn.Parameter(torch.randn(3))
        self.last = nn.Parameter(torch.randn(3, 2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = Strided.apply(Signs.apply(self.conv(x).tanh(), self.signs), self.up, self.bias)
        # The gradient of a convolution is a transposed one, and differentiable.
        size = len(y), self.last.shape[1], *y.shape[2:]
        return torch.nn.grad.conv2d_input(size, self.last, y.tanh(), padding=1)


def errors(partition: str) -> dict[str, float]:
    """The largest relative error of each gradient."""
    torch.manual_seed(2)
    plain, x = Net().double(), torch.randn(4, 2, 6, 8).double()
    expected = copy.deepcopy(plain)
    expected(x).tanh().sum().backward()
    mesh = distconv.init(partition, device_type="cpu")
    model = distconv.parallelize(plain, mesh)
    model(distconv.shard(x, mesh)).tanh().sum().backward()
    pairs = zip(expected.named_parameters(), plain.parameters(), strict=True)
    return {
        name: float((distconv.gather(own.grad) - right.grad).abs().max() / right.grad.abs().max())  # type: ignore[arg-type, union-attr]
        for (name, right), own in pairs
    }


@pytest.mark.gloo
@pytest.mark.parametrize("partition", ["height=2", "sample=2", "channel=2", "filter=2"])
def test_asked_gradients_equal_one_process(ranks: Callable[[int], Ranks], partition: str) -> None:
    for found in ranks(2).run(errors, partition):
        assert max(found.values()) < 1e-10
