"""Budgets by step: where steps begin, what is recorded, and that no step's peak memory rises."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_memory import TensorMemory
from torch import nn

import mucudnn
from mucudnn.budgets.memory import HostRecorder
from mucudnn.budgets.steps import MOST_TRIES, Steps
from mucudnn.devices import Host, device_of
from mucudnn.optimizer import Timeline
from mucudnn.providers.stock import Stock
from mucudnn.timing import clock
from mucudnn.timing.measurement import Measurement

HOST = device_of(torch.device("cpu"))

KIB = 2**10
MIB = 2**20


class Script:
    """A recorder of a made-up program: the timelines that it will find, and what was asked of it."""

    one_thread = True

    def __init__(self, *timelines: Timeline) -> None:
        self.timelines = list(timelines)
        self.starts, self.running, self.steps, self.marks = 0, False, 0, 0

    def start(self) -> bool:
        self.starts, self.running, self.steps = self.starts + 1, True, 0
        return True

    def step(self) -> None:
        assert self.running
        self.steps += 1

    def mark(self, size: int) -> None:
        assert self.running
        self.marks += bool(self.steps)

    def stop(self) -> list[Timeline]:
        self.running = False
        return self.timelines


def play(steps: Steps, names: str) -> list[int | None]:
    """Calls: capitals forward, small letters backward."""
    return [steps.call(name, name.isupper(), 0) for name in names]


def test_a_step_that_repeats_is_recorded_and_then_has_budgets() -> None:
    script = Script(Timeline((5, 7, 9, 6), 10), Timeline((6, 7, 8, 6), 11))
    steps = Steps(script, Timeline.budgets)
    for number in range(4):  # it is met, memory turns over, and two are recorded
        assert play(steps, "ABba") == [None] * 4
        assert script.running == (number > 0)
    assert script.marks == 8
    for _ in range(3):
        assert play(steps, "ABba") == [4, 3, 1, 4]
    assert script.starts == 1 and not script.running


def test_a_step_of_other_shapes_runs_without_and_is_recorded_in_its_turn() -> None:
    steps = Steps(Script(Timeline((5, 7, 9, 6), 10), Timeline((5, 7, 9, 6), 10)), Timeline.budgets)
    for _ in range(4):
        play(steps, "ABba")
    for _ in range(4):
        assert play(steps, "CDdc") == [None] * 4
    assert play(steps, "CDdc") == [5, 3, 1, 4]
    assert play(steps, "ABba") == [5, 3, 1, 4]
    assert play(steps, "ABca") == [5, 3, None, None]  # known so far, then no more


def test_of_steps_that_begin_alike_the_smaller_budget_counts() -> None:
    script = Script(Timeline((5, 7, 9, 6), 10), Timeline((5, 7, 9, 6), 10))
    steps = Steps(script, Timeline.budgets)
    for _ in range(5):
        play(steps, "ABba")
    script.timelines = [Timeline((9, 1, 1, 1), 10)] * 2
    for _ in range(5):
        play(steps, "ABbb")
    assert play(steps, "ABba") == [1, 3, 1, 4]
    assert play(steps, "ABbb") == [1, 3, 1, 9]


def test_what_never_comes_twice_is_not_recorded_for_ever() -> None:
    script = Script()
    steps = Steps(script, Timeline.budgets)
    for _ in range(3 * MOST_TRIES):
        play(steps, "ABba")
        play(steps, "CDdc")
    play(steps, "A")
    assert script.starts <= 2 * MOST_TRIES and not script.running


def test_no_recording_begins_at_the_call_where_another_ends() -> None:
    """The operators around that call would begin under the one and end under the other."""
    script = Script(Timeline((5, 7, 9, 6), 10), Timeline((5, 7, 9, 6), 10))
    steps = Steps(script, Timeline.budgets)
    for step in ("ABba", "ABba", "CDdc", "CDdc", "CDdc", "ABba", "CDdc", "CDdc", "CDdc", "CDdc", "CDdc", "ABba"):
        for name in step:
            starts, was_running = script.starts, script.running
            steps.call(name, name.isupper(), 0)
            assert not (was_running and script.starts > starts)
    assert script.starts > 1 and not script.running


def test_a_program_that_only_goes_forward_has_no_steps() -> None:
    script = Script()
    assert play(Steps(script, Timeline.budgets), "AB" * 50) == [None] * 100
    assert script.starts == 0


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["ABba", "Aa", "ABCcba", "ABb"]), max_size=40))
def test_budgets_are_those_of_what_was_recorded(program: list[str]) -> None:
    class Recording(Script):
        def mark(self, size: int) -> None:
            if self.steps:
                self.timelines[self.steps - 1] += (size,)  # type: ignore[operator]

        def step(self) -> None:
            super().step()
            self.timelines = [*self.timelines, ()] if self.steps > 1 else [()]  # type: ignore[list-item]

        def stop(self) -> list[Timeline]:
            self.running = False
            return [Timeline(tuple(live), 100) for live in self.timelines[:-1]]  # type: ignore[arg-type]

    sizes = {letter: 2 * place for place, letter in enumerate("ABCabc")}
    steps = Steps(Recording(), Timeline.budgets)
    for step in program:
        for letter in step:
            budget = steps.call(letter, letter.isupper(), sizes[letter])
            assert budget in (None, 100 - sizes[letter])


# Memory.


def test_the_recorder_agrees_with_the_profiler() -> None:
    recorder = HostRecorder(HOST)
    old = torch.empty(3 * MIB, dtype=torch.uint8)
    before = HOST.held()
    assert recorder.start()
    for _ in range(3):
        recorder.step()
        one = torch.empty(MIB, dtype=torch.uint8)
        recorder.mark(100)
        two = torch.empty(2 * MIB, dtype=torch.uint8)
        del one
        recorder.mark(0)
        del two
    first, second = recorder.stop()
    assert first == second
    assert first.live == (first.live[0], first.live[0] + MIB - 100)
    assert first.peak == first.live[0] - 100 + 2 * MIB
    assert abs(first.live[0] - 100 - MIB - before) < 256 * KIB  # of all that the process holds
    assert old.numel()


def test_two_profilers_do_not_meet() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not HostRecorder(HOST).start()


# Programs.


def network(width: int = 6) -> nn.Sequential:
    """Large kernels, of which the first and the last leave most memory to others."""
    blocks = [
        layer
        for _ in range(3)
        for layer in (nn.Conv2d(width, width, 9, padding=4), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.0))
    ]
    return nn.Sequential(nn.Conv2d(2, width, 3, padding=1), *blocks, nn.Conv2d(width, 2, 1))


class Program:
    """A training loop, the peak of tensors' memory taken in every step."""

    def __init__(self, accumulate: int = 1) -> None:
        torch.manual_seed(0)
        self.module = network()
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.accumulate = accumulate
        self.losses: list[float] = []
        self.number = 0

    def step(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(self.number)
        x = torch.randn(samples, 2, 24, 24, generator=generator)
        loss = self.module(x).square().mean()
        loss.backward()
        self.number += 1
        if self.number % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def peaks(self, batches: list[int], measured: int) -> list[int]:
        """Of the last `measured` steps; the profiler measures no step in which budgets are recorded."""
        unmeasured = len(batches) - measured
        for samples in batches[:unmeasured]:
            self.step(samples)
        found = []
        for samples in batches[unmeasured:]:
            with TensorMemory() as memory:
                self.step(samples)
            found.append(memory.peak)
        return found


@pytest.fixture
def slow_stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's own kernel looks slow, so that workspace is taken wherever there is some."""
    monkeypatch.setattr(Measurement, "stock_seconds", lambda self: 1e3)
    monkeypatch.setattr(clock, "ratio", lambda work, baseline, clock=None: (work(), 0.1)[1])
    monkeypatch.setattr(clock, "seconds", clock.first_seconds)
    monkeypatch.setattr(Stock, "algorithms", lambda self, problem: ())
    return


PROGRAMS: dict[str, tuple[int, list[int], int]] = {
    "one shape": (1, [4] * 10, 4),
    "another shape": (1, [4] * 7 + [6, 4, 6, 2, 4, 6], 6),
    "a new shape that stays": (1, [4] * 7 + [6] * 8, 3),
    "accumulated gradients": (3, [4] * 15, 6),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_no_step_s_peak_rises(kind: str, slow_stock: None) -> None:
    accumulate, batches, measured = PROGRAMS[kind]
    plain = Program(accumulate)
    expected = plain.peaks(batches, measured)
    with mucudnn.patched(workspace_limit="peak", database=":memory:") as session:
        patched = Program(accumulate)
        peaks = patched.peaks(batches, measured)
        records = session.records()
        timeline = session.timeline()
    assert peaks <= expected and all(peak <= most for peak, most in zip(peaks, expected, strict=True))
    assert max(record.workspace for record in records) > 64 * KIB
    assert sum(moment.workspace > 0 for moment in timeline) >= 5
    assert all(moment.workspace <= moment.budget for moment in timeline)
    torch.testing.assert_close(patched.losses, plain.losses, rtol=1e-3, atol=1e-5)


def test_planning_within_a_step_does_not_raise_its_peak_either(
    slow_stock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = max(Program().peaks([4] * 4, 2))
    program = Program()
    with mucudnn.patched(workspace_limit="peak", database=":memory:") as session:
        with monkeypatch.context() as capture:
            # As in the capture of a CUDA graph nothing is measured: the step has budgets, but no plans yet.
            capture.setattr(Host, "is_capturing", lambda self: session.timeline() != [])
            program.peaks([4] * 5, 0)
        assert session.records() == [] and len(session.timeline()) > 0
        with TensorMemory() as memory:
            program.step(4)
        assert max(record.workspace for record in session.records()) > 64 * KIB
    assert memory.peak <= plain


def test_a_limit_on_all_memory(slow_stock: None) -> None:
    program = Program()

    def most(limit: float) -> int:
        with mucudnn.patched(memory_limit=limit, database=":memory:") as session:
            for _ in range(7):
                program.step(4)
            return max((record.workspace for record in session.records()), default=0)

    assert most(2**40) > 64 * KIB
    now = HOST.held()  # the first profiler leaves some of its own behind
    assert most(now) == 0
    assert 0 < most(now + 3 * MIB) <= 3 * MIB


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workspace_limit": "peak", "total_workspace_size": "1MiB"}, "workspace_limit=peak and total_workspace_size"),
        ({"memory_limit": "1GiB", "total_workspace_size": "1MiB"}, "memory_limit=1 GiB and total_workspace_size"),
        ({"memory_limit": "peak"}, "memory_limit='peak'"),
    ],
)
def test_what_excludes_each_other(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mucudnn.patch(**given)


def test_the_command_takes_them(tmp_path: Any, slow_stock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from mucudnn.__main__ import main
    from mucudnn.reporting.run_file import Outcome

    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(
        "import torch\n"
        "c = torch.nn.Conv2d(2, 2, 9, padding=4)\n"
        "d = torch.nn.Conv2d(2, 2, 9, padding=4)\n"
        "for _ in range(7):\n"
        "    d(c(torch.ones(4, 2, 32, 32)).relu().exp()).sum().backward()\n"
    )
    arguments = ["run", "--workspace-limit", "peak", "--database", ":memory:", "--report", str(report), str(script)]
    assert main(arguments) == 0
    import json

    outcome = Outcome.from_json(json.loads(report.read_text()))
    assert len(outcome.timeline) == 5 and outcome.timeline[0].name.startswith("forward 4x2x32x32")
    assert all(0 <= moment.workspace <= moment.budget < math.inf for moment in outcome.timeline)
