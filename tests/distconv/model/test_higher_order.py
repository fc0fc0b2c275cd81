"""Operators that are given functions: `torch.cond` calls one of them, and others are refused in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

import distconv

pytestmark = pytest.mark.gloo


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cond(y.mean() > 0, lambda y: y * self.layer.bias[:, None, None], lambda y: y.cos(), (y,))


class Repeated(Chosen):
    def forward(self, x: Tensor) -> Tensor:
        _i, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.9), (torch.tensor(0), self.layer(x)))
        return y


def trained(partition: str | None, bias: float) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = Chosen().double(), torch.randn(4, 2, 8, 6).double()
    nn.init.constant_(model.layer.bias, bias)
    if partition is None:
        y = model.layer(x)
        y = y * model.layer.bias[:, None, None] if y.mean() > 0 else y.cos()
    else:
        mesh = distconv.init(partition, device_type="cpu")
        model = distconv.parallelize(model, mesh)
        y = distconv.gather(model(distconv.shard(x, mesh)))
    y.square().sum().backward()
    return distconv.whole_state([y.detach(), *(parameter.grad for parameter in model.parameters())])


def refused(partition: str) -> str:
    mesh = distconv.init(partition, device_type="cpu")
    model = distconv.parallelize(Repeated(), mesh)
    with torch.no_grad(), pytest.raises(distconv.UnsupportedOperation) as caught:
        model(distconv.shard(torch.randn(4, 2, 8, 6), mesh))
    return str(caught.value)


@pytest.mark.parametrize("partition", ["height=2", "channel=2"])
def test_a_condition_chooses_as_in_one_process(ranks: Callable[[int], Ranks], partition: str) -> None:
    for bias in (2.0, -2.0):
        for found in ranks(2).run(trained, partition, bias):
            torch.testing.assert_close(found, trained(None, bias), rtol=1e-10, atol=1e-12)


def test_a_loop_of_shards_is_refused_in_one_line(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(refused, "height=2")
    assert first == second
    assert first.startswith("while_loop: an operator of functions knows no shards; accepted: ")
    assert "\n" not in first
