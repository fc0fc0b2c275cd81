"""Live planning: results while it tries, what it finds on a made-up clock, and what the next run does with that."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import made_up_clock
import pytest
import torch
from made_up_clock import STOCK_SECONDS, MadeUp
from torch import nn
from torch.nn import functional

import mucudnn
from mucudnn.convolution.tile import Part
from mucudnn.devices import speeds
from mucudnn.optimizer import OverheadBudget
from mucudnn.planning import search
from mucudnn.providers.fft import Fft
from mucudnn.providers.gemm import Gemm
from mucudnn.runtime import explored as exploring
from mucudnn.runtime import shim
from mucudnn.runtime.decision import Decision
from mucudnn.runtime.explored import Explored
from mucudnn.runtime.live import LivePlanning
from mucudnn.runtime.session import Session
from mucudnn.settings import Settings
from mucudnn.timing.schedule import Schedule
from mucudnn.timing.store import Store


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is granted and nothing is too short, so that small tensors are explored at once."""
    monkeypatch.setattr(OverheadBudget, "grants", lambda overhead, seconds, **named: True)
    monkeypatch.setattr(search, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(exploring, "WORTH", 0)


def explored(session: Session) -> list[Explored]:
    assert session._live is not None
    return list(session._live._explored.values())


X, W = torch.randn(8, 3, 12, 12), torch.randn(5, 3, 5, 5)

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "plain": (nn.Conv2d(3, 4, 3, padding=1), (4, 3, 11, 10)),
    "strided, dilated, no bias": (nn.Conv2d(3, 4, 3, stride=2, dilation=2, bias=False), (5, 3, 13, 12)),
    "groups": (nn.Conv2d(4, 8, 3, groups=2, padding=1), (3, 4, 9, 9)),
    "1-D": (nn.Conv1d(3, 4, 9, padding=4), (4, 3, 30)),
    "3-D, one volume": (nn.Conv3d(2, 3, 3, padding=1), (1, 2, 8, 7, 6)),
    "transposed": (nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (4, 3, 8, 8)),
    "float64": (nn.Conv2d(3, 4, 3, padding=1).double(), (4, 3, 11, 10)),
    "bfloat16": (nn.Conv2d(3, 4, 3, padding=1).bfloat16(), (4, 3, 11, 10)),
    "channels_last": (nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last), (4, 3, 11, 10)),
}


def gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(torch.sin(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape).to(y.dtype))
    found = [y, x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [tensor.detach().double() for tensor in found if tensor is not None]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", LAYERS)
def test_every_call_gives_the_results_of_float64(name: str) -> None:
    layer, shape = LAYERS[name]
    dtype = next(layer.parameters()).dtype
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    if name == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    expected = [tensor.clone() for tensor in gradients(layer.double(), x.double())]
    layer.to(dtype)
    strides = layer(x).stride()
    tolerance = {torch.bfloat16: 5e-2, torch.float64: 1e-10}.get(dtype, 1e-4)
    with mucudnn.patched(planning="live", database=":memory:") as session:
        for _ in range(40):
            found = gradients(layer, x)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max().item())
            assert layer(x).stride() == strides
        assert sum(record.trials for record in session.records()) >= 3, "something must have been tried"


@pytest.mark.parametrize("late", [0, 3])
def test_the_fastest_is_found_and_kept(late: int, monkeypatch: pytest.MonkeyPatch, own_database: Path) -> None:
    machine = MadeUp(monkeypatch, fft=0.1)
    machine.late = late
    with mucudnn.patched(planning="live") as session:
        for _ in range(100 * (1 + late)):
            functional.conv2d(X, W)
        (record,) = session.records()
        assert {algorithm for _, algorithm in record.parts} == {"fft"} and record.trials > 0
        assert all(one.after is not None for one in explored(session))
        assert record.seconds == pytest.approx(0.1) and record.stock_seconds == pytest.approx(1.0)
        before, read = machine.now, machine.read
        functional.conv2d(X, W)
        assert machine.now - before == pytest.approx(0.1) and machine.read == read
    with mucudnn.patched(planning="live") as session:
        calls = [functional.conv2d(X, W) for _ in range(3)]
        (again,) = session.records()
        assert (again.parts, again.dim, again.trials) == (record.parts, record.dim, 0)
        assert torch.equal(calls[1], calls[2])


def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The launches from now on, by algorithm and samples."""
    found: list[tuple[str, int]] = []
    for provider in (Fft, Gemm):
        own = provider.launch

        def launch(self: Any, algorithm: str, parts: Any, accumulate: bool, own: Callable[..., None] = own) -> None:
            found.extend((algorithm, part.problem.extent) for part in parts)
            own(self, algorithm, parts, accumulate)

        monkeypatch.setattr(provider, "launch", launch)
    return found


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("slower", [1.0, 40.0])
def test_a_run_that_is_cut_short_leaves_what_it_knew_to_the_next(
    slower: float, monkeypatch: pytest.MonkeyPatch, own_database: Path
) -> None:
    machine = MadeUp(monkeypatch, fft=0.1)
    launches = launched(monkeypatch)
    session = Session(Settings.from_environment(planning="live"))
    before = shim.install(session)
    try:
        for _ in range(7):
            functional.conv2d(X, W)
        assert [one.after for one in explored(session)] == [None] and launches
        session.store._deferred.flush()  # as its thread does within a second; the run ends here
    finally:
        shim.install(before)
    first = set(launches)
    assert Store(str(own_database)).counts().launches >= 2
    machine.per_sample = {name: slower * seconds for name, seconds in machine.per_sample.items()}
    monkeypatch.setattr(made_up_clock, "STOCK_SECONDS", slower)
    launches.clear()
    with mucudnn.patched(planning="live") as again:
        calls = 0
        while any(one.after is None for one in explored(again)) or not calls:
            functional.conv2d(X, W)
            calls += 1
        (record,) = again.records()
    assert "fft" in record.division and calls < 40
    assert not first & set(launches[:1]), "nothing is timed again to know it"


def test_a_debt_does_not_keep_a_run_from_what_is_known_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, own_database: Path
) -> None:
    machine = MadeUp(monkeypatch, fft=0.1)
    with monkeypatch.context() as unsettled, mucudnn.patched(planning="live"):
        unsettled.setattr(search.Search, "keep", lambda *arguments: None)
        for _ in range(60):
            functional.conv2d(X, W)
    with mucudnn.patched(planning="live") as again:
        assert again._live is not None
        again._live.budget.overhead.count(0.0, 1000 * STOCK_SECONDS)
        before = machine.now
        for _ in range(20):
            functional.conv2d(X, W)
        assert machine.now - before < 6 * STOCK_SECONDS


def test_what_planning_takes_beside_other_work_does_not_keep_trials_from_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measuring the processor's speeds takes a hundred calls' time, and everything else waits for the processor."""
    machine, passed, used = MadeUp(monkeypatch, fft=0.1, gemm=0.1), itertools.count(0, 100 * STOCK_SECONDS), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: next(passed))
    monkeypatch.setattr(time, "process_time", lambda: sum(used))
    monkeypatch.setattr(speeds, "measure_type", lambda *_: used.append(100 * STOCK_SECONDS))
    with mucudnn.patched(planning="live", database=":memory:") as session:
        for _ in range(40):
            functional.conv2d(X, W)
        assert explored(session)[0].after is not None and machine.now < 20 * STOCK_SECONDS


@pytest.mark.parametrize(("calls", "most"), [(10, 0.4), (50, 0.8)])
def test_where_nothing_is_gained_the_calls_cost_little_more(
    calls: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a share of the calls so far, a trial may take longer than expected, and is checked."""
    machine, excess = MadeUp(monkeypatch, fft=8.0, gemm=5.0), 2.0
    with mucudnn.patched(planning="live", database=":memory:") as session:
        for _ in range(calls):
            before = machine.now
            functional.conv2d(X, W)
            machine.now = max(machine.now, before + STOCK_SECONDS)  # what torch computes by itself moves no clock
        assert session.records()[0].trials > 0
    assert machine.now <= (calls + most + excess) * STOCK_SECONDS


@pytest.mark.usefixtures("eager")
def test_nothing_that_is_tried_exceeds_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    MadeUp(monkeypatch, fft=0.1, gemm=0.2)
    limit, own, seen = 60_000, Schedule.run, []

    def run(schedule: Schedule, *arguments: Any) -> None:
        seen.append(max(schedule.workspaces()))
        own(schedule, *arguments)

    monkeypatch.setattr(Schedule, "run", run)
    with mucudnn.patched(planning="live", database=":memory:", workspace_limit=limit):
        for _ in range(40):
            functional.conv2d(X, W)
    assert seen and max(seen) <= limit


@pytest.mark.usefixtures("eager")
def test_what_fails_is_computed_by_torch_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    MadeUp(monkeypatch, gemm=0.3)
    tries = []

    def failing(provider: Fft, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        tries.append(algorithm)
        raise RuntimeError("no memory")

    monkeypatch.setattr(Fft, "launch", failing)
    expected = functional.conv2d(X, W)
    with mucudnn.patched(planning="live", database=":memory:") as session:
        for _ in range(60):
            torch.testing.assert_close(functional.conv2d(X, W), expected, rtol=1e-4, atol=1e-4)
        (record,) = session.records()
    assert "gemm" in {algorithm for _, algorithm in record.parts}
    assert 0 < len(tries) <= 8


def test_a_short_convolution_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    MadeUp(monkeypatch)
    monkeypatch.setattr(search, "LEAST_SECONDS", 2.0)
    with mucudnn.patched(planning="live", database=":memory:") as session:
        for _ in range(5):
            functional.conv2d(X, W)
        assert list(session.decisions.values()) == [None]


@pytest.mark.usefixtures("eager")
def test_threads_explore_together() -> None:
    expected, wrong = functional.conv2d(X, W), []

    def work() -> None:
        for _ in range(40):
            if not torch.allclose(functional.conv2d(X, W), expected, rtol=1e-4, atol=1e-4):
                wrong.append(threading.get_ident())

    with mucudnn.patched(planning="live", database=":memory:"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_layers_of_one_shape_explore_together(monkeypatch: pytest.MonkeyPatch) -> None:
    MadeUp(monkeypatch, fft=0.1)
    with mucudnn.patched(planning="live", database=":memory:") as session:
        for number in range(60):
            functional.conv2d(X, W * number)
        assert len(explored(session)) == 1 and len(session.records()) == 1


def test_shapes_that_are_met_a_few_times_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    MadeUp(monkeypatch, fft=0.1)
    monkeypatch.setattr(exploring, "PREPARING_SECONDS", 20 * STOCK_SECONDS / exploring.WORTH)
    with mucudnn.patched(planning="live", database=":memory:") as session:
        for rows in range(6, 12):
            for _ in range(19):
                functional.conv2d(X[:, :, :rows], W)
        assert explored(session) == []
        assert [record.division for record in session.records()] == ["stock(8)"] * 6
        for _ in range(250):
            functional.conv2d(X[:, :, :8], W)
        assert sum("fft" in record.division for record in session.records()) == 1 == len(explored(session))


def test_nothing_is_kept_of_a_shape_that_is_met_once() -> None:
    layer = nn.Conv2d(3, 4, 3)
    with mucudnn.patched(planning="live", database=":memory:") as session:
        for width in (8, 9, 10):
            layer(torch.randn(2, 3, 8, width)).sum().backward()
        assert not session.decisions
        layer(torch.randn(2, 3, 8, 9)).sum().backward()
        assert [shape for _, (_, shape, *_) in session.decisions] == [(2, 3, 8, 9), (2, 4, 6, 7)]


def test_a_convolution_that_torch_has_computed_is_not_asked_again_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, layer = [], nn.Conv2d(3, 4, 3)
    monkeypatch.setattr(LivePlanning, "avoids_stock", lambda *args: asked.append(args) or False)
    with mucudnn.patched(planning="live", database=":memory:") as session:
        for _ in range(3):
            layer(torch.randn(2, 3, 8, 8)).sum().backward()
        assert len(session.decisions) == 2 and not asked
    with mucudnn.patched(planning="live", database=":memory:", workspace_limit=1):
        layer(torch.randn(2, 3, 8, 8))
    assert len(asked) == 1, "which by its shapes may exceed the limit"


def test_few_calls_are_timed_before_a_shape_is_worth_exploring(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MadeUp(monkeypatch)
    monkeypatch.setattr(exploring, "PREPARING_SECONDS", 20 * STOCK_SECONDS / exploring.WORTH)
    with mucudnn.patched(planning="live", database=":memory:"):
        functional.conv2d(X, W)
        assert machine.now == 0
        for _ in range(18):
            functional.conv2d(X, W)
        assert machine.now == STOCK_SECONDS, "the second call is timed"
        functional.conv2d(X, W)
        assert machine.now > STOCK_SECONDS, "and the next ones once it is met often"


def test_calls_are_not_looked_at_while_nothing_may_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch computes meanwhile counts for the trials all the same."""
    MadeUp(monkeypatch)
    granted = iter([False, True])  # first no preparation, and then no trial
    monkeypatch.setattr(OverheadBudget, "grants", lambda overhead, seconds, **named: next(granted, False))
    looks: list[Decision] = []
    wake = Decision._wake
    monkeypatch.setattr(Decision, "_wake", lambda one: looks.append(one) or wake(one))
    with mucudnn.patched(planning="live", database=":memory:") as session:
        for _ in range(200):
            functional.conv2d(X, W)
        assert len(looks) < 25
        exploration = explored(session)[0]._exploration
        assert exploration is not None and exploration.settled is None and 180 < exploration.calls < 200


def test_the_weights_gradient_is_timed_as_torch_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[list[bool]] = []

    def noted(kernel: Any, *arguments: Any) -> Any:
        masks.append(list(arguments[-1]))
        return kernel(*arguments)

    own = shim.stock_kernel
    monkeypatch.setattr(shim, "stock_kernel", lambda operator, key: partial(noted, own(operator, key)))
    layer, x = nn.Conv2d(3, 5, 5), X[:4]
    expected = gradients(layer, x)
    with mucudnn.patched(planning="live", database=":memory:"):
        for _ in range(2):
            for one, other in zip(gradients(layer, x), expected, strict=True):
                torch.testing.assert_close(one, other)
    assert masks == [[True, True, True], [False, True, True]], "the input's gradient is timed by itself"


@pytest.mark.usefixtures("eager")
def test_deterministic_programs_compute_the_same_from_the_second_run_on(
    monkeypatch: pytest.MonkeyPatch, own_database: Path
) -> None:
    MadeUp(monkeypatch, fft=0.1)
    torch.use_deterministic_algorithms(True)
    try:
        divisions = []
        for calls in (6, 40, 40):
            with mucudnn.patched(planning="live") as session:
                for _ in range(calls):
                    functional.conv2d(X, W)
                (record,) = session.records()
                divisions.append((record.division, record.trials > 0))
        assert divisions == [("stock(8)", True), ("stock(8)", False), ("stock(8)", False)]
    finally:
        torch.use_deterministic_algorithms(False)
    with mucudnn.patched(planning="live") as session:
        for _ in range(60):
            functional.conv2d(X, W)
        assert "fft" in session.records()[0].division, "it may be found where nobody asked for the same"


def test_what_was_slow_for_a_similar_convolution_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MadeUp(monkeypatch, fft=8.0, gemm=8.0)
    launched: list[str] = []
    for provider in (Fft, Gemm):
        own = provider.launch

        def launch(self: Any, algorithm: str, *arguments: Any, own: Callable[..., None] = own) -> None:
            launched.append(algorithm)
            own(self, algorithm, *arguments)

        monkeypatch.setattr(provider, "launch", launch)

    def run(x: torch.Tensor) -> set[str]:
        launched.clear()
        with mucudnn.patched(planning="live") as session:
            for _ in range(1000):
                before = machine.now
                functional.conv2d(x, W)
                machine.now = max(machine.now, before + STOCK_SECONDS)
            assert all(one.after is not None for one in explored(session))
        return set(launched)

    assert run(X) == {"fft", "gemm"}
    assert run(X[:, :, :11].contiguous()) == set()
