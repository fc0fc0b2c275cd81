"""Predicted updates of parameters: how often an optimizer's bytes pass through memory, and what the host takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_machine import TEXT
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distconv.performance.choice import PartitionPlanner
from distconv.performance.costs import PASSES, update_seconds
from distconv.performance.events import RecordedStep
from distconv.performance.layers import trace
from distconv.performance.machine import parse
from distconv.performance.recording import on_meta
from distconv.performance.recordings import Recordings
from distconv.performance.without_data import imagined_job
from distconv.settings.partition import Partition

OPTIMIZERS = {
    0.0: lambda parameters: torch.optim.SGD(parameters),
    1.0: lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    2.0: lambda parameters: torch.optim.Adam(parameters),
}


class Passes(TorchDispatchMode):
    """Counts how many tensors of a size kernels read and write."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            read = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel() == self.size}
            written = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.numel() == self.size]
            self.count += len(read) + len(written)
        return result


@pytest.mark.parametrize("states", PASSES)
def test_bytes_pass_through_memory_as_often_as_torch_reads_and_writes_them(states: float) -> None:
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = OPTIMIZERS[states]([parameter])
    for _ in range(2):  # states are made by the first
        parameter.grad = torch.ones(1000)
        with Passes(1000) as passes:
            optimizer.step()
    assert passes.count == PASSES[states]


def test_an_update_takes_memory_and_on_a_processor_the_host_for_each_parameter() -> None:
    step = RecordedStep((), 0, 0, 4 * 10**6, 100)
    behind = parse(TEXT.replace("asynchronous = true", "asynchronous = false"))
    ahead = replace(behind, host=replace(behind.host, asynchronous=True))
    host, moving = 100 * behind.host.operator, 18 * 4e6 / behind.device.bandwidth
    assert host > 0
    assert update_seconds(step, behind, 2.0) == pytest.approx(host + moving)
    assert update_seconds(step, ahead, 2.0) == pytest.approx(moving)


def test_a_planned_step_contains_the_update_and_a_call_has_none() -> None:
    model, found = on_meta(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))), [Partition.parse("sample=4")]
    machine, graph = parse(TEXT), trace(model, (4, 3, 8, 8))
    size = 4 * sum(p.numel() for p in model.parameters())
    with imagined_job(4):
        for trains in (True, False):
            recordings = Recordings(model, graph, trains=trains)
            plan = PartitionPlanner(model, graph, found, machine, states=2.0, recordings=recordings).best()
            assert (plan.step.parameters, plan.step.tensors) == (size, 4)
            update = update_seconds(plan.step, machine, 2.0) if trains else 0.0
            assert plan.update == update and plan.seconds == plan.times.total + update
