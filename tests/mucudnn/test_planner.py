"""What the planner measures, keeps and decides, on a made-up machine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from made_up_machine import STOCK_SECONDS, Machine, problem

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import Dim, Direction
from mucudnn.optimizer import Trial
from mucudnn.optimizer.exploration import MOST_CONTENDERS
from mucudnn.optimizer.playoff import ROUNDS
from mucudnn.planning.plan import MARGIN, Plan
from mucudnn.planning.planner import PATIENCE, Planner
from mucudnn.planning.search import LEAST_SECONDS
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers import HOST_PROVIDERS
from mucudnn.settings import Settings
from mucudnn.timing import clock
from mucudnn.timing.store import Store


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """An algorithm "fast" of 1 ms and 10 ms and 100 bytes per sample, beside torch's own kernel of a second."""
    machine = Machine({"fast": lambda extent: 0.001 + 0.01 * extent}, lambda extent: 100 * extent)
    machine.install(monkeypatch)
    return machine


def plan(machine: Machine, extent: int, limit: float, policy: str = "powerOfTwo", store: Store | None = None) -> Plan:
    settings = Settings.from_environment({}, workspace_limit=limit, policy=policy, database=":memory:", check="off")
    planner = Planner(settings, store or Store(":memory:"), (machine,))
    return planner.plan(planner.measurement(problem(extent)))


@pytest.mark.parametrize(
    ("extent", "limit", "policy", "parts"),
    [
        (16, math.inf, "undivided", [16]),
        (16, 1600, "undivided", [16]),
        (16, 1599, "powerOfTwo", [8, 8]),
        (16, 400, "powerOfTwo", [4, 4, 4, 4]),
        (12, 1199, "powerOfTwo", [8, 4]),
        (12, 1199, "all", [11, 1]),
        (7, 300, "all", [3, 3, 1]),
    ],
)
def test_the_fastest_that_fits(machine: Machine, extent: int, limit: float, policy: str, parts: list[int]) -> None:
    chosen = plan(machine, extent, limit, policy)
    assert sum(option.extent for option in chosen.division.options) == extent
    assert len(chosen.division.options) == len(parts)
    assert chosen.division.workspace <= limit
    assert {option.algorithm for option in chosen.division.options} == {"fast"}


@pytest.mark.parametrize(("limit", "policy"), [(0, "all"), (99, "all"), (1599, "undivided")])
def test_what_does_not_fit_stays_with_torch(machine: Machine, limit: float, policy: str) -> None:
    assert plan(machine, 16, limit, policy).is_stock


def test_limit_zero_measures_no_algorithm(machine: Machine) -> None:
    machine.bytes = lambda extent: 0
    assert plan(machine, 16, 0).is_stock
    assert machine.launches == []


@pytest.mark.parametrize(("ratio", "taken"), [(1 - MARGIN - 0.01, True), (1 - MARGIN + 0.01, False), (2.0, False)])
def test_only_what_is_measurably_faster_is_taken(machine: Machine, ratio: float, taken: bool) -> None:
    machine.ratio = ratio
    chosen = plan(machine, 16, math.inf)
    assert chosen.is_stock != taken
    assert chosen.record.seconds == (ratio * STOCK_SECONDS if taken else STOCK_SECONDS)


def test_a_division_that_disappoints_gives_way_to_the_next(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.seconds = {"lucky": lambda extent: 0.003 * extent, "fast": lambda extent: 0.01 * extent}

    def laps(runner: TrialRunner, trial: Trial, given: Operands) -> list[float]:
        if trial.division is None:
            return [STOCK_SECONDS]
        return [1.5 if trial.division.options[0].algorithm == "lucky" else 0.3]

    monkeypatch.setattr(TrialRunner, "laps", laps)
    assert {algorithm for algorithm, _ in plan(machine, 16, math.inf).division.runs()} == {"fast"}


def test_short_convolutions_are_left_to_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "seconds", lambda work, clock: LEAST_SECONDS / 2)
    assert plan(machine, 16, math.inf).is_stock
    assert machine.launches == []


@pytest.mark.parametrize(("first", "again"), [(clock.BUDGET / 2, 1), (clock.BUDGET * 2, 0)])
def test_a_long_call_that_was_made_anyway_is_not_repeated(
    first: float, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(clock, "again_seconds", lambda *arguments: calls.append(arguments) or STOCK_SECONDS)
    planner = Planner(Settings.from_environment({}, database=":memory:"), Store(":memory:"), ())
    made_up = planner.measurement(problem(4))
    measurement = planner.measurement(problem(4), made_up.turn(), made_up.strides, first)
    assert measurement.stock_seconds() == (STOCK_SECONDS if again else first)
    assert [arguments[-1] for arguments in calls] == [first] * again, "calls may still become faster than it"


def test_a_algorithm_that_cannot_win_is_measured_once(machine: Machine) -> None:
    machine.seconds["fast"] = lambda extent: 10.0 * extent
    assert plan(machine, 16, math.inf, "all").is_stock
    assert machine.launches == [("fast", (4,))]


def test_sizes_between_slow_ones_are_not_measured(machine: Machine) -> None:
    machine.seconds["fast"] = lambda extent: 1.1 * extent / 64
    assert plan(machine, 64, math.inf, "all").is_stock
    assert {extent for _, extents in machine.launches for extent in extents} <= {2**n for n in range(7)}


def test_what_gains_little_is_not_measured_for_long(machine: Machine) -> None:
    machine.seconds["fast"] = lambda extent: 0.9 * extent / 64
    machine.ratio = 0.9
    assert plan(machine, 64, math.inf, "all").record.seconds == 0.9 * STOCK_SECONDS
    launches = machine.launches
    timed = sum(machine.seconds["fast"](sum(extents)) for _, extents in launches)
    assert timed <= (PATIENCE + 2 + MOST_CONTENDERS * ROUNDS) * STOCK_SECONDS
    assert 7 < len({extents for _, extents in launches}) < 64, "some sizes between the powers of two, but not all"


def test_what_was_slow_elsewhere_is_not_measured_again(machine: Machine) -> None:
    machine.seconds["fast"] = lambda extent: 1.0 * extent
    store = Store(":memory:")
    settings = Settings.from_environment({}, workspace_limit="unlimited", database=":memory:", check="off")
    planner = Planner(settings, store, (machine,))
    assert planner.plan(planner.measurement(problem(16))).is_stock
    assert machine.launches
    machine.launches.clear()
    for extent in (32, 48):
        assert planner.plan(planner.measurement(problem(extent))).is_stock
    again = Planner(settings, store, (machine,))
    assert again.plan(again.measurement(problem(64))).is_stock, "the database tells as much"
    assert machine.launches == []


def test_one_odd_time_rules_no_algorithm_out(machine: Machine) -> None:
    planner = Planner(
        Settings.from_environment({}, workspace_limit="unlimited", check="off"), Store(":memory:"), (machine,)
    )
    machine.seconds["fast"] = lambda extent: 2.5 / 16 * extent
    assert planner.plan(planner.measurement(problem(16))).is_stock
    machine.seconds["fast"] = lambda extent: 0.5 / 16 * extent
    found = planner.plan(planner.measurement(problem(16, channels=4)))
    assert {option.algorithm for option in found.division.options} == {"fast"}


def test_small_kernels_rule_no_algorithm_out_for_a_far_larger_one(machine: Machine) -> None:
    planner = Planner(
        Settings.from_environment({}, workspace_limit="unlimited", check="off"), Store(":memory:"), (machine,)
    )
    machine.seconds["fast"] = lambda extent: 4.0 / 16 * extent
    for channels in (2, 3, 4, 5, 6):
        assert planner.plan(planner.measurement(problem(16, channels))).is_stock
    machine.launches.clear()
    assert planner.plan(planner.measurement(problem(16, 7))).is_stock
    assert machine.launches == [], "a convolution like the others is left to torch unseen"
    machine.seconds["fast"] = lambda extent: 0.5 / 16 * extent
    found = planner.plan(planner.measurement(problem(16, 7, kernel=31)))
    assert {option.algorithm for option in found.division.options} == {"fast"}


def test_what_was_measured_once_is_taken_again(machine: Machine) -> None:
    machine.seconds = {"fast": lambda extent: 0.055 * extent, "lucky": lambda extent: 0.05 * extent}
    store = Store(":memory:")
    first = plan(machine, 16, math.inf, "all", store)
    measured = len(machine.launches)
    for extent in (3, 5, 24):
        plan(machine, extent, math.inf, "all", store)  # what is learnt of others changes nothing
    machine.launches.clear()
    again = plan(machine, 16, math.inf, "all", store)
    assert (again.division, again.options) == (first.division, first.options)
    assert measured and machine.launches == []


def test_the_database_answers_other_limits_and_batches(machine: Machine) -> None:
    store = Store(":memory:")
    plan(machine, 16, 400, store=store)
    measured = len(machine.launches)
    again = plan(machine, 16, 400, store=store)
    assert again.division.runs() == (("fast", (4, 4, 4, 4)),)
    assert len(machine.launches) == measured  # all of it came from the database
    plan(machine, 32, 400, store=store)
    assert set(machine.launches[measured:]) == {("fast", (4,) * 8)}  # only the new division as a whole
    measured = len(machine.launches)
    plan(machine, 16, 800, store=store)
    assert [parts for _, parts in machine.launches[measured:] if len(parts) == 1] == [(8,)] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"dilation": (2, 1)},
        {"groups": 2},
        {"dtype": "float64"},
        {"direction": Direction.BACKWARD_DATA},
        {"transposed": True},
        {"formats": ("channels_last",) * 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_problems_do_not_share_times(change: dict[str, Any]) -> None:
    assert replace(problem(4), **change).launch_key() != problem(4).launch_key()


@pytest.mark.parametrize(("total", "every"), [(None, False), ("1600", True)])
def test_under_a_total_what_needs_less_is_measured_too(machine: Machine, total: str | None, every: bool) -> None:
    machine.seconds["fast"] = lambda extent: 0.02 + 0.001 * extent  # the whole is by far the best
    named = {"workspace_limit": "1600", "total_workspace_size": total}
    planner = Planner(
        Settings.from_environment({}, **named, database=":memory:", check="off"), Store(":memory:"), (machine,)
    )
    found = planner.plan(planner.measurement(problem(16)))
    assert found.division.runs() == (("fast", (16,)),)
    sizes = {option.extent for option in found.options[Dim.BATCH] if option.algorithm == "fast"}
    assert (sizes == {1, 2, 4, 8, 16}) is every


def test_a_failing_algorithm_is_no_option(machine: Machine) -> None:
    machine.failing["fast"] = 8
    assert plan(machine, 16, math.inf).division.runs() == (("fast", (4, 4, 4, 4)),)


def test_providers_name_each_algorithm_once() -> None:
    names = [name for provider in HOST_PROVIDERS for name in provider.algorithms(problem(1))]
    assert sorted(names) == ["fft", "gemm", "onednn", "stock"]
