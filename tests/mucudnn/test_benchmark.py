"""Medians and ratios on a clock of the test's own."""

from __future__ import annotations

import pytest

from mucudnn import benchmark


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time now, in a list of one; it moves only when a test says so."""
    now = [0.0]
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])
    return now


def takes(clock: list[float], seconds: list[float]) -> benchmark.Work:
    """Work that takes the given seconds, call by call, the last of them for ever."""
    left = list(seconds)

    def work() -> None:
        clock[0] += left.pop(0) if len(left) > 1 else left[0]

    return work


def test_seconds_are_the_median_after_a_warm_up(clock: list[float]) -> None:
    assert benchmark.seconds(takes(clock, [0.1, 0.01, 0.05, 0.02, 0.03, 0.04])) == pytest.approx(0.03)


def test_long_work_is_called_once(clock: list[float]) -> None:
    assert benchmark.seconds(takes(clock, [2.0, 1.0])) == pytest.approx(2.0)


def test_a_slow_baseline_is_called_once_where_the_work_is_far_faster(clock: list[float]) -> None:
    calls: list[float] = []
    slow = takes(clock, [20.0])
    assert benchmark.ratio(takes(clock, [0.2, 0.1]), lambda: (calls.append(1.0), slow())) == pytest.approx(0.005)
    assert len(calls) == 1
    assert benchmark.ratio(takes(clock, [19.0]), lambda: (calls.append(1.0), slow())) == pytest.approx(0.95)
    assert len(calls) == 1 + 4


def test_ratio_does_not_trust_a_lucky_half(clock: list[float]) -> None:
    work = takes(clock, [1e-3, *[1e-3, 3e-3] * 6])
    assert benchmark.ratio(work, takes(clock, [2e-3])) == pytest.approx(1.5)


def test_ratio_cancels_a_drift_of_the_machine(clock: list[float]) -> None:
    drift = [1e-3 * 1.5**i for i in range(12)]
    ratio = benchmark.ratio(takes(clock, [1.0, *drift]), takes(clock, [2 * seconds for seconds in drift]))
    assert ratio == pytest.approx(0.5)
