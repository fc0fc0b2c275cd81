"""Medians and ratios on a clock of the test's own."""

from __future__ import annotations

import math
import time

import pytest

from mucudnn.timing import clock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time now, in a list of one; it moves only when a test says so."""
    moment = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: moment[0])
    return moment


def takes(now: list[float], seconds: list[float]) -> clock.Work:
    """Work that takes the given seconds, call by call, the last of them for ever."""
    left = list(seconds)

    def work() -> None:
        now[0] += left.pop(0) if len(left) > 1 else left[0]

    return work


def test_seconds_are_the_median_after_a_warm_up(now: list[float]) -> None:
    assert clock.seconds(takes(now, [0.1, 0.001, 0.0005, 0.002, 0.003, 0.004])) == pytest.approx(0.002)
    assert clock.seconds(takes(now, [0.1, 0.02, 0.5])) == pytest.approx(0.02)


def test_long_work_is_called_once(now: list[float]) -> None:
    assert clock.seconds(takes(now, [2.0, 1.0])) == pytest.approx(2.0)


def test_a_slow_baseline_is_called_once_where_the_work_is_far_faster(now: list[float]) -> None:
    calls: list[float] = []
    slow = takes(now, [20.0])
    assert clock.ratio(takes(now, [0.1]), lambda: (calls.append(1.0), slow())) == pytest.approx(0.005)
    assert len(calls) == 1
    assert clock.ratio(takes(now, [19.0]), lambda: (calls.append(1.0), slow())) == pytest.approx(0.95)
    assert len(calls) == 1 + clock.LEAST_PAIRS, "long calls are not repeated"


@pytest.mark.parametrize(("seconds", "pairs"), [(0.07, 3), (0.12, 1)])
def test_of_long_calls_all_count(now: list[float], seconds: float, pairs: int) -> None:
    calls: list[float] = []
    slow = takes(now, [0.1])
    ratio = clock.ratio(takes(now, [seconds]), lambda: (calls.append(1.0), slow()), wanted=0.95)
    assert (ratio, len(calls)) == (pytest.approx(10 * seconds), pairs)


def test_slow_work_is_not_repeated(now: list[float]) -> None:
    assert clock.again_seconds(takes(now, [0.002, 0.001]), most=0.0015) == pytest.approx(0.002)
    assert clock.again_seconds(takes(now, [0.001, 0.003, 0.001]), most=0.002) == pytest.approx(0.002)


def test_calls_count_once_they_no_longer_become_much_faster(now: list[float]) -> None:
    falling = [0.05, 0.03, 0.028, 0.01]
    assert clock.again_seconds(takes(now, falling), math.inf) == pytest.approx(0.05)
    assert clock.again_seconds(takes(now, falling), math.inf, before=0.1) == pytest.approx(0.028)
    assert clock.again_seconds(takes(now, falling), math.inf, before=0.06) == pytest.approx(0.05)


def test_what_is_not_wanted_is_compared_no_further(now: list[float]) -> None:
    calls: list[float] = []

    def work() -> None:
        calls.append(1.0)
        now[0] += 1e-3

    assert clock.ratio(work, takes(now, [1e-3]), wanted=0.95) == pytest.approx(1.0)
    assert len(calls) <= 1 + 2 * clock.LEAST_PAIRS
    calls.clear()
    assert clock.ratio(work, takes(now, [1e-3])) == pytest.approx(1.0)
    assert len(calls) == 1 + clock.PAIRS + clock.PAIRS // 2


@pytest.mark.parametrize(("seconds", "pairs"), [(1.2e-3, 1), (1.1e-3, 2), (1e-3, clock.LEAST_PAIRS)])
def test_what_is_far_from_what_is_wanted_is_compared_once(now: list[float], seconds: float, pairs: int) -> None:
    baselines: list[float] = []

    def baseline() -> None:
        baselines.append(1.0)
        now[0] += 1e-3

    assert clock.ratio(takes(now, [seconds]), baseline, wanted=0.95) == pytest.approx(1e3 * seconds)
    assert len(baselines) == pairs + pairs // 2


@pytest.mark.parametrize(("seconds", "pairs"), [(0.5e-3, clock.LEAST_PAIRS), (0.9e-3, clock.ENOUGH_PAIRS)])
def test_what_is_faster_every_time_needs_few_pairs(now: list[float], seconds: float, pairs: int) -> None:
    baselines: list[float] = []

    def baseline() -> None:
        baselines.append(1.0)
        now[0] += 1e-3

    assert clock.ratio(takes(now, [seconds]), baseline, wanted=0.95) == pytest.approx(1e3 * seconds)
    assert len(baselines) == pairs + pairs // 2  # every second pair has one that is not timed


def test_ratio_does_not_trust_a_lucky_half(now: list[float]) -> None:
    work = takes(now, [1e-3, *[1e-3, 3e-3] * 6])
    assert clock.ratio(work, takes(now, [2e-3])) == pytest.approx(1.5)


def test_ratio_cancels_a_drift_of_the_machine(now: list[float]) -> None:
    drift = [1e-3 * 1.5**i for i in range(12)]
    ratio = clock.ratio(takes(now, [0.04, *drift]), takes(now, [2 * seconds for seconds in drift]))
    assert ratio == pytest.approx(0.5)
