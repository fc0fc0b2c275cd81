"""No call of a training step's waits for the card, with the comparison of what ranks hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import distconv
from distconv.agreement.ledger import ledger


@pytest.fixture(autouse=True)
def in_order() -> None:
    """The order is not watched: a fake group gathers on the stream it is called on, for which nobody then waits."""


@pytest.fixture
def one_of_two(card: Any) -> Iterator[None]:
    """This process is the first of two ranks; the other one says what it says."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # makes the backend known

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("fully", [False, True])
def test_a_step_of_a_rank_does_not_wait(fully: bool, card: Any, one_of_two: None) -> None:
    mesh = distconv.init("sample=2", device_type="cuda")
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 64, 12, padding=6)).cuda()
    model = distconv.parallelize(net, mesh, shard_parameters=fully)
    assert isinstance(net[2].weight, DTensor) == fully
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 2, 8, 8, device="cuda")
    waits = []
    for _ in range(6):
        before = card.counted("waits")
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        waits.append(card.counted("waits") - before)
    checked = ledger(mesh)
    assert checked is not None and checked._made >= 5
    assert card.counted("waits") > 0 and waits[3:] == [0, 0, 0]
