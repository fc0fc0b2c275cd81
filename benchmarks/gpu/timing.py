"""Times of work on a device, arms in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from benchmarks.harness import turns
from mucudnn.devices import Work
from mucudnn.devices.host import HOST_CLOCK

LEAST_ROUNDS, MOST_ROUNDS = 5, 50

FLUSH_BYTES = 512 * 2**20
"""Ten times the largest L2 cache: writing so much leaves nothing of the operands there, and gives the host a tenth of a
millisecond to enqueue what is timed."""


class Arm(Protocol):
    """What takes its turn."""

    def seconds(self, clock: Clock) -> float:
        """Of one call."""
        ...


@dataclass(frozen=True)
class Here:
    """Work of this process, and what is set up around it but not timed."""

    work: Work
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def seconds(self, clock: Clock) -> float:
        with self.around():
            return clock.seconds(self.work)


def peak(arm: Here, device: torch.device) -> int | None:
    """Bytes of tensors that a call allocates at its peak, its result among them; None on the host."""
    if device.type != "cuda":
        return None
    with arm.around():
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        arm.work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before


class Clock(Protocol):
    """Tells how long work takes."""

    def seconds(self, work: Work) -> float: ...


class FlushingClock:
    """For work on a GPU, by events on the current stream, after its L2 cache has been overwritten."""

    def __init__(self, device: torch.device) -> None:
        self._cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(self, work: Work) -> float:
        self._cache.zero_()
        self._start.record()
        work()
        self._stop.record()
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop) / 1e3


def clock_of(device: torch.device) -> Clock:
    return FlushingClock(device) if device.type == "cuda" else HOST_CLOCK


def in_turn(arms: Mapping[str, Arm], clock: Clock, seconds: float) -> dict[str, list[float]]:
    """Seconds of every arm, one call of each per round, first calls left out.

    Args:
        seconds: after which no round begins, but there are `LEAST_ROUNDS`.
    """
    for arm in arms.values():
        arm.seconds(clock)
    calls = {name: partial(arm.seconds, clock) for name, arm in arms.items()}
    return turns(calls, seconds, LEAST_ROUNDS, MOST_ROUNDS)


def ratio(slower: list[float], faster: list[float]) -> float:
    """How many times as fast `faster` is: the median over rounds."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))
