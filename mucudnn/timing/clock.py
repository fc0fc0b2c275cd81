"""Times launches: one alone, or two against each other, on the host or on a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], object]

REPETITIONS = 5
"""Timed calls whose median is taken."""

BUDGET = 0.2
"""Seconds after which fewer repetitions, at least `LEAST_REPETITIONS`, must do."""

LEAST_REPETITIONS = 2

PAIRS = 11
"""Timed pairs of calls when two are compared."""

PAIRS_BUDGET = 0.5
"""Seconds after which fewer pairs, at least `LEAST_PAIRS`, must do."""

LEAST_PAIRS = 3

DECISIVE = 0.5
"""Where a call of the baseline takes longer than the budget, and the work less than this share of it, the baseline is
not called again."""

LEAST_BATCH = 2e-3
"""Seconds of work between two events of a GPU, so that the host is ahead as in a program, and events weigh little."""

MOST_CALLS = 20


class Clock(Protocol):
    """Tells how long work takes where it runs."""

    def warm_up(self, work: Work) -> None:
        """Does what the first call of work does beside it."""
        ...

    def seconds(self, work: Work) -> float:
        """Seconds of one call."""
        ...


class HostClock:
    """For work that is done when its call returns."""

    def warm_up(self, work: Work) -> None:
        pass  # slight beside the work

    def seconds(self, work: Work) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


class CudaClock:
    """For work that a call enqueues on the current stream, by CUDA events; short work is called several times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def warm_up(self, work: Work) -> None:
        with torch.cuda.device(self._device):
            work()
            torch.cuda.current_stream().synchronize()

    def seconds(self, work: Work) -> float:
        with torch.cuda.device(self._device):
            once = self._elapsed(work, 1)
            calls = min(MOST_CALLS, math.ceil(LEAST_BATCH / max(once, 1e-9)))
            return once if calls == 1 else self._elapsed(work, calls) / calls

    def _elapsed(self, work: Work, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


HOST = HostClock()


def clock_of(device: torch.device) -> Clock:
    """The clock for work on a device."""
    return CudaClock(device) if device.type == "cuda" else HOST


def first_seconds(work: Work, clock: Clock = HOST) -> float:
    """Seconds of one call; nothing has warmed it up but, on a GPU, another call."""
    clock.warm_up(work)
    return clock.seconds(work)


def seconds(work: Work, clock: Clock = HOST) -> float:
    """Median seconds of a call, warmed up; what takes longer than `BUDGET` is called once, its warm-up being slight."""
    first = first_seconds(work, clock)
    if first > BUDGET:
        return first
    times: list[float] = []
    while len(times) < LEAST_REPETITIONS or (len(times) < REPETITIONS and sum(times) < BUDGET):
        times.append(clock.seconds(work))
    return statistics.median(times)


def ratio(work: Work, baseline: Work, clock: Clock = HOST) -> float:
    """How long `work` takes at most in units of `baseline`: the upper quartile over pairs of calls run in turn.

    In turn, because a machine's speed drifts; ratios, because a drift then falls on both; the upper quartile, because
    `work` is to be no slower when the moment is not lucky. In every second pair each call follows one of its own kind:
    it finds the memory that it left to the allocator, in the other pairs what the other left. The baseline is expected
    to be warm.
    """
    work()
    ratios: list[float] = []
    spent, slow = 0.0, 0.0
    while len(ratios) < LEAST_PAIRS or (len(ratios) < PAIRS and spent < PAIRS_BUDGET):
        again = len(ratios) % 2 == 1
        if again:
            work()
        mine = clock.seconds(work)
        if again and not slow:
            baseline()
        theirs = slow or clock.seconds(baseline)
        if theirs > PAIRS_BUDGET and mine < DECISIVE * theirs:
            slow = theirs
        ratios.append(mine / theirs)
        spent += mine + theirs
    return statistics.quantiles(ratios, n=4, method="inclusive")[-1]
