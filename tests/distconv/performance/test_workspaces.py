"""Partitions and mucudnn's workspace, chosen together: within one bound of memory, and kept in a strategy file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import small_network
import torch

from distconv.job.launcher import BadInput, Job, check_job
from distconv.model.strategy import Strategy, as_toml, read_strategy
from distconv.performance import machine as machines
from distconv.performance.choice import PartitionPlanner
from distconv.performance.divisions import Divisions, divided_here, problems, shares
from distconv.performance.events import Kernel, KernelCall, Shape
from distconv.performance.imagined import imagined_job
from distconv.performance.layers import trace
from distconv.performance.recording import on_meta
from distconv.settings.partition import Partition
from mucudnn.convolution.problem import Direction
from mucudnn.optimizer import Division, DoesNotFit, Option


def test_workspace_and_partitions_are_bounded_together() -> None:
    """Convolutions that take half of their time with 1 MiB of workspace, and a tenth with 4."""

    def divided(kernel: Kernel) -> tuple[tuple[float, int], ...]:
        return ((1.0, 0), (0.5, 2**20), (0.1, 2**22)) if "convolution" in kernel.name else ()

    machine = machines.read_machine("lassen")
    slow = replace(machine, device=replace(machine.device, flops=1e7), divided=divided)
    model = on_meta(small_network.Small)
    graph = trace(model, small_network.SHAPE)
    with imagined_job(4):
        planner = PartitionPlanner(model, graph, [Partition.parse("sample=4"), Partition.parse("height=4")], slow)
        free = planner.best()
        own = free.memory(planner.states) - free.workspace
        plans = [planner.best(limit) for limit in (own + 2**22, own + 2**21, own + 2**20 - 1)]
        with pytest.raises(DoesNotFit) as refused:
            planner.best(own / 4)
    assert [plan.workspace for plan in (free, *plans)] == [2**22, 2**22, 2**20, 0]
    seconds = [plan.times.total for plan in plans]
    assert seconds == sorted(seconds) and seconds[0] == free.times.total < seconds[1] < seconds[2]
    assert own / 4 < refused.value.least <= own


def test_a_strategy_file_tells_the_workspace(tmp_path: Path) -> None:
    path = tmp_path / "strategy.toml"
    path.write_text(as_toml({"*": "sample=2"}, 2**20))
    assert read_strategy(path) == replace(Strategy.parse({"*": "sample=2"}), workspace_limit=2**20)
    path.write_text('workspace_limit = "much"\n[layers]\n"*" = "sample=2"\n')
    with pytest.raises(ValueError, match="workspace_limit = 'much'; accepted"):
        read_strategy(path)


def test_divisions_of_a_recorded_convolution() -> None:
    x, w = Shape((8, 4, 32, 32), (4096, 1024, 32, 1), torch.float32), Shape((4, 4, 3, 3), (36, 9, 3, 1), torch.float32)
    arguments = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    forward = KernelCall(torch.ops.aten.convolution.default, (x, w, None, *arguments), ())
    backward = KernelCall(
        torch.ops.aten.convolution_backward.default, (x, x, w, None, *arguments, [True, True, False]), ()
    )
    assert [problem.direction for call in (forward, backward) for problem in problems(call)] == [*Direction]
    assert problems(KernelCall(torch.ops.aten.relu.default, (x,), ())) == []

    def division(seconds: float, workspace: int) -> Division:
        return Division((Option(8, "a", seconds, workspace),))

    sets = [[division(3, 0), division(1, 10)], [division(1, 0), division(0.5, 5)]]
    assert shares(sets) == ((0.875, 5), (0.375, 10))
    found = Divisions(1, ":memory:")(Kernel("aten.convolution.default", 1, 1, forward))
    assert all(0 < share < 1 and size >= 0 for share, size in found)


def test_a_machine_file_tells_no_divisions() -> None:
    with pytest.raises(ValueError, match=r"--workspaces: .* accepted: --machine here"):
        divided_here(machines.read_machine("lassen"))


def test_a_strategy_with_a_workspace_is_reported_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    strategy = Strategy.parse({"*": "sample=2"})
    job = Job(Partition.parse("sample=2"), str(script), strategy=strategy, report=str(tmp_path / "run.json"))
    with pytest.raises(BadInput, match="--report writes what mucudnn chose"):
        check_job(job, 2, "gloo")
    check_job(replace(job, strategy=replace(strategy, workspace_limit=2**20)), 2, "gloo")
