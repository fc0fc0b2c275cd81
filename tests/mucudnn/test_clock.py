"""Medians on a clock of the test's own, and what a measurement makes for its calls."""

from __future__ import annotations

import math
import time

import pytest
import torch

from mucudnn.convolution.problem import ConvProblem, Dim, Direction
from mucudnn.devices import Host
from mucudnn.providers.gemm import GEMM, Gemm
from mucudnn.settings import MEMORY
from mucudnn.timing import clock, measurement
from mucudnn.timing.logbook import Environment, Logbook
from mucudnn.timing.store import Store


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


def test_what_the_processor_does_for_others_does_not_count(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([0.0, 0.5, 3.5])
    monkeypatch.setattr(time, "process_time", lambda: next(used))
    watch = Host(torch.device("cpu")).stopwatch()
    for moment in (2.0, 3.0):
        now[0] = moment
        watch.lap()
    assert watch.laps() == [0.5, 1.0], "of several threads the clock's time counts"


def test_seconds_are_the_median_after_a_warm_up(now: list[float]) -> None:
    assert clock.seconds(takes(now, [0.1, 0.001, 0.0005, 0.002, 0.003, 0.004])) == pytest.approx(0.002)
    assert clock.seconds(takes(now, [0.1, 0.02, 0.5])) == pytest.approx(0.02)


def test_long_work_is_called_once(now: list[float]) -> None:
    assert clock.seconds(takes(now, [2.0, 1.0])) == pytest.approx(2.0)


def test_slow_work_is_not_repeated(now: list[float]) -> None:
    assert clock.again_seconds(takes(now, [0.002, 0.001]), most=0.0015) == pytest.approx(0.002)
    assert clock.again_seconds(takes(now, [0.001, 0.003, 0.001]), most=0.002) == pytest.approx(0.002)


def test_calls_count_once_they_no_longer_become_much_faster(now: list[float]) -> None:
    falling = [0.05, 0.03, 0.028, 0.01]
    assert clock.again_seconds(takes(now, falling), math.inf) == pytest.approx(0.05)
    assert clock.again_seconds(takes(now, falling), math.inf, before=0.1) == pytest.approx(0.028)
    assert clock.again_seconds(takes(now, falling), math.inf, before=0.06) == pytest.approx(0.05)


def test_a_launch_of_a_large_mini_batch_is_timed_on_few_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made, tile = [], measurement.tile
    monkeypatch.setattr(measurement, "tile", lambda *given: made.append(given) or tile(*given))
    problem = ConvProblem.of_convolution(
        Direction.FORWARD, (5000, 1, 3, 3), (1, 1, 1, 1), stride=(1, 1), padding=(0, 0), dilation=(1, 1)
    )
    environment = Environment("test", threads=1, deterministic=False, precision="", libraries="")
    launches = measurement.Measurement(problem, Logbook(environment, Store(MEMORY)))
    assert launches.seconds((Gemm(), GEMM), Dim.BATCH, 1, math.inf) > 0
    assert 0 < len(made) < 100
