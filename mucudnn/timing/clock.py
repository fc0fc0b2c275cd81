"""Times launches on the host or on a GPU."""

from __future__ import annotations

import math
import statistics

from mucudnn.devices import Clock, Work
from mucudnn.devices.host import HOST_CLOCK

ENOUGH = 0.01  # Seconds of calls after which there are no more.

BUDGET = 0.2
"""A first call that takes more seconds is not repeated; nor is a call of torch's own kernel that the program made."""

FALLING = 0.8
"""A first call of torch's own kernel that takes less than this share of the call before is not counted, as calls are
still getting faster: a program's first calls also allocate its memory."""


def first_seconds(work: Work, clock: Clock = HOST_CLOCK) -> float:
    """Seconds of the first call. On a GPU one call before it is not timed, as the first call also loads its kernels."""
    return clock.first(work)


def seconds(work: Work, clock: Clock = HOST_CLOCK) -> float:
    """Median seconds of a call after a first one. If the first takes longer than `BUDGET` it is the only call, as its
    warm-up is then a small part of it."""
    first = first_seconds(work, clock)
    return first if first > BUDGET else again_seconds(work, math.inf, clock, 0.0, first)


def again_seconds(
    work: Work, most: float, clock: Clock = HOST_CLOCK, before: float = 0.0, expected: float | None = None
) -> float:
    """Median seconds of calls after a first one. The calls end as soon as one takes more than `most` seconds.

    Args:
        before: seconds of the first call, if calls count only from the one on that is not much faster than that before.
        expected: about the seconds of a call, if that is known.
    """
    times: list[float] = []
    while not times or (len(times) < clock.repetitions and sum(times) < ENOUGH and times[-1] <= most):
        seconds = expected = clock.seconds(work, expected)
        if not times and seconds < FALLING * before:
            before = seconds
        else:
            times.append(seconds)
    return statistics.median(times)
