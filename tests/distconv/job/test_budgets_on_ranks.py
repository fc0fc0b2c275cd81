"""Budgets by step and totals on several ranks: they serve own work, and what ranks compute equal stays equal."""

from __future__ import annotations

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
from mucudnn.convolution.call import Call
from mucudnn.optimizer import OverheadBudget
from mucudnn.planning import search
from mucudnn.providers import stock_call
from mucudnn.runtime import explored
from mucudnn.runtime.decision import is_local_work
from mucudnn.runtime.shared_total import SharedTotal
from mucudnn.runtime.step_budget import StepBudget
from mucudnn.timing.measurement import Measurement

pytestmark = pytest.mark.gloo

STEPS = 20
SHAPE = 4, 3, 13, 12
"""An odd number of rows, so that ranks that divide them need unlike memory."""

LIMITS = {
    "peak": {"workspace_limit": "peak"},
    "memory": {"memory_limit": "64GiB"},
    "total": {"total_workspace_size": "1MiB"},
}


class Net(nn.Module):
    """A convolution of images, and one of a parameter, which all ranks compute equal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.of_images = nn.Conv2d(3, 8, 5, padding=2)
        self.positions = nn.Parameter(torch.randn(1, 3, 12, 12))
        self.of_positions = nn.Conv2d(3, 8, 5, padding=2)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.of_images(x), self.of_positions(self.positions)


def stepped(model: nn.Module) -> tuple[list[float], list[bytes]]:
    """Of every step the loss, and the gradients of what the ranks compute equal."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    losses, equal = [], []
    for _ in range(STEPS):
        model.zero_grad()
        y, positions = model(x)
        loss = y.square().mean() + functional.relu(positions).square().mean()
        loss.backward()
        losses.append(loss.item())
        gradients = [p.grad for name, p in model.named_parameters() if "positions" in name]
        equal += [getattr(each, "to_local", lambda whole=each: whole)().numpy().tobytes() for each in gradients]
    return losses, equal


def within(prefix: str, partition: str, limit: str, planning: str) -> dict[str, Any]:
    """What a rank computes where every convolution is explored, and odd ranks round otherwise within their budgets."""
    board = StoreBoard(dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store()))
    served = []

    def watched(run: Callable[[Any, Call], Tensor | None]) -> Callable[[Any, Call], Tensor | None]:
        def watching(decision: Any, call: Call) -> Tensor | None:
            served.append(is_local_work())
            result = run(decision, call)
            if dist.get_rank() % 2:
                result = (stock_call(call) if result is None else result).mul_(1 + 1e-12)
            return result

        return watching

    with MonkeyPatch.context() as eager:
        eager.setattr(OverheadBudget, "grants", lambda overhead, seconds, **named: True)
        eager.setattr(explored, "WORTH", 0)
        eager.setattr(search, "LEAST_SECONDS", 0.0)
        if planning == "ahead":
            eager.setattr(Measurement, "stock_seconds", lambda measurement: 1.0)  # so that a division is taken
        for kind in (StepBudget, SharedTotal):
            eager.setattr(kind, "run", watched(kind.run))
        given = {"planning": planning, "database": ":memory:", "progress": "off", **LIMITS[limit]}
        with mucudnn.patched(board=board, **given) as session:
            model = distconv.parallelize(Net(), distconv.init(partition, device_type="cpu"))
            losses, equal = stepped(model)
            trials, notices = sum(record.trials for record in session.records()), session.outcome().notices
    return {"losses": losses, "equal": equal, "served": served, "trials": trials, "notices": notices}


@pytest.mark.parametrize("planning", ["ahead", "live"])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("partition", ["sample=2", "height=2"])
def test_ranks_hold_the_same_to_the_bit(
    ranks: Callable[[int], Ranks], partition: str, limit: str, planning: str
) -> None:
    losses, _ = stepped(Net())
    first, second = ranks(2).run(within, f"budgets {partition} {limit} {planning}", partition, limit, planning)
    assert first["equal"] == second["equal"]
    for found in first, second:
        assert found["losses"] == pytest.approx(losses, rel=1e-9)
        assert all(found["served"]), "only a rank's own work has a budget of the rank's"
        assert found["notices"]
    assert first["served"] and second["served"], "something was computed within it"
    trials = first["trials"] + second["trials"]
    assert trials > 0 if planning == "live" else trials == 0
