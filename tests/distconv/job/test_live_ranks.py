"""Live planning on several ranks: own parts are explored, what ranks compute alike stays alike to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional

import distconv
import mucudnn
from distconv.job.board import StoreBoard
from mucudnn.devices import Host
from mucudnn.optimizer import Exploration, OverheadBudget, exploration
from mucudnn.planning import search
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.runtime import explored

pytestmark = pytest.mark.gloo

STEPS = 40
SHAPE = 8, 3, 12, 12


class Net(nn.Module):
    """Two convolutions of images, and one of a parameter, which all ranks compute alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Conv2d(3, 16, 5, padding=2), nn.Conv2d(16, 4, 3, padding=1)
        self.positions = nn.Parameter(torch.randn(1, 3, 12, 12))
        self.of_positions = nn.Conv2d(3, 16, 5, padding=2)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(functional.relu(self.first(x))), self.of_positions(self.positions)


def images() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def stepped(model: nn.Module) -> tuple[list[float], list[list[Tensor]], list[bytes]]:
    """Of every step the loss, the gradients, and what the convolution of the parameter gives on this rank."""
    losses, gradients, alike = [], [], []
    for _ in range(STEPS):
        model.zero_grad()
        y, positions = model(images())
        loss = y.square().mean() + positions.square().mean()
        loss.backward()
        losses.append(loss.item())
        alike.append(getattr(positions, "full_tensor", lambda x=positions: x)().detach().numpy().tobytes())
        gradients.append([getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)() for p in model.parameters()])
    return losses, gradients, alike


def rounded_otherwise(run: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """As some algorithms round; others give what torch's own kernel gives to the bit, where tensors are so small."""

    def otherwise(*arguments: Any) -> tuple[Tensor, Any]:
        result, watch = run(*arguments)
        return result.mul_(1 + 1e-12), watch

    return otherwise


def grant_every_trial(eager: MonkeyPatch) -> None:
    """Trials are granted whatever they take and whatever is known: measured speeds of the machine rule none out."""
    eager.setattr(OverheadBudget, "grants", lambda overhead, seconds, **named: True)
    eager.setattr(Exploration, "bar", lambda exploration, algorithm, best=None: math.inf)
    eager.setattr(exploration, "MOST_CALLS", math.inf)
    eager.setattr(Host, "least_seconds", lambda host, *effort: 0.0)


def explored_by_all(prefix: str, partition: str) -> dict[str, Any]:
    """What a rank computes where no convolution is too short: even ranks are granted every trial, odd ones none."""
    board = StoreBoard(dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store()))
    mesh = distconv.init(partition, device_type="cpu")
    with MonkeyPatch.context() as eager:
        grant_every_trial(eager)
        eager.setattr(explored, "WORTH", math.inf if dist.get_rank() % 2 else 0)
        eager.setattr(TrialRunner, "run", rounded_otherwise(TrialRunner.run))
        eager.setattr(search, "LEAST_SECONDS", 0.0)
        with mucudnn.patched(board=board, planning="live", database=":memory:", progress="off") as session:
            losses, gradients, alike = stepped(distconv.parallelize(Net(), mesh))
            trials = sum(record.trials for record in session.records())
            # Of the shape of a rank's own part, under "sample" alone, but the same on all ranks.
            size = SHAPE[0] // mesh.size(0)
            plain = [functional.conv2d(images()[:size], Net().first.weight, padding=2) for _ in range(5)]
            return {
                "losses": losses,
                "gradients": gradients,
                "trials": trials,
                "trials after": sum(record.trials for record in session.records()),
                "alike": alike + [x.detach().numpy().tobytes() for x in plain],
                "notices": session.outcome().notices,
            }


@pytest.mark.parametrize(("size", "partition"), [(2, "sample=2"), (4, "sample=2,height=2"), (2, "channel=2")])
def test_own_parts_are_explored(ranks: Callable[[int], Ranks], size: int, partition: str) -> None:
    losses, gradients, _ = stepped(Net())
    answers = ranks(size).run(explored_by_all, f"live {partition}", partition)
    for rank, found in enumerate(answers):
        assert (found["trials"] > 0) is (rank % 2 == 0), "a rank's own parts were tried in some ways"
        assert found["losses"] == pytest.approx(losses, rel=1e-9)
        for step, right, elsewhere in zip(found["gradients"], gradients, answers[0]["gradients"], strict=True):
            for one, other, same in zip(step, right, elsewhere, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
                assert one.equal(same), "what ranks hold of a gradient is the same to the bit"
        assert found["trials after"] == found["trials"] and found["notices"] == []
    assert all(found["alike"] == answers[0]["alike"] for found in answers), "to the bit"


def held_whole(prefix: str) -> tuple[int, list[bytes]]:
    """Trials of a layer that ranks compute alike, since its input is not sharded, and what it gives."""
    board = StoreBoard(dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store()))
    with MonkeyPatch.context() as eager:
        eager.setattr(search, "LEAST_SECONDS", 0.0)
        with mucudnn.patched(board=board, planning="live", database=":memory:", progress="off") as session:
            layer = Net().first
            found = [layer(images()).detach().numpy().tobytes() for _ in range(STEPS)]
            return sum(record.trials for record in session.records()), found


def test_what_several_ranks_compute_is_not_explored(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(held_whole, "alike")
    assert first == second and first[0] == 0
