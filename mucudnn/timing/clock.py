"""Times launches on the host or on a GPU, one alone or two against each other."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator

from mucudnn.devices import Clock, Work
from mucudnn.devices.host import HOST_CLOCK

ENOUGH = 0.01
"""Seconds of calls after which there are no more."""

BUDGET = 0.2
"""A first call that takes more seconds is not repeated; nor is a call of torch's own kernel that the program made."""

LONG = 0.05
"""In a comparison, a first call that takes more seconds counts, since its warm-up is a small part of it."""

FALLING = 0.8
"""A first call of torch's own kernel that takes less than this share of the call before is not counted, as calls are
still getting faster: a program's first calls also allocate its memory."""

PAIRS = 7
"""The most timed pairs of calls in a comparison of two kinds of work."""

PAIRS_BUDGET = 0.5
"""Seconds after which fewer pairs, at least `LEAST_PAIRS`, suffice."""

LEAST_PAIRS = 3

ENOUGH_PAIRS = 5
"""So many pairs suffice if all their ratios are below the wanted one."""

CLEARLY = 0.9
"""Fewer pairs suffice if all their ratios are below this share of the wanted one."""

LOST = 1.2
"""The comparison is lost if the first ratio exceeds the wanted one by this factor, or the first two by its root."""

DECISIVE = 0.5
"""The baseline is not called again if one call of it takes longer than the budget, and the work takes less than this
share of it."""


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


def ratio(work: Work, baseline: Work, clock: Clock = HOST_CLOCK, wanted: float = math.inf) -> float:
    """How long `work` takes at most in units of `baseline`: the upper quartile over pairs of calls run in turn.

    The two are called in turn because a machine's speed changes over time; a change then falls on both of a pair and
    leaves their ratio as it is. The upper quartile is taken, and not the median, so that `work` is chosen only if it is
    faster nearly always. The baseline must have been called before.

    Args:
        wanted: what the result must be below to be of interest: there are no more pairs once it is clear whether it is.
    """
    ratios: list[float] = []
    spent = 0.0
    for mine, theirs in _pairs(work, baseline, clock):
        ratios.append(mine / theirs)
        spent += mine + theirs
        is_enough = len(ratios) >= PAIRS or (len(ratios) >= LEAST_PAIRS and spent >= PAIRS_BUDGET)
        if is_enough or _is_settled(ratios, wanted):
            break
    return _quartiles(ratios)[-1]


def _pairs(work: Work, baseline: Work, clock: Clock) -> Iterator[tuple[float, float]]:
    """Seconds of both, called in turn without end.

    The state of the allocator depends on the call before. In every second pair this is a call of the same kind, in the
    others one of the other kind, and the first call is not counted. Where calls take more than `LONG` seconds this
    matters little, and all calls count, except a first one that is slower than the baseline.
    """
    mine = clock.seconds(work)
    theirs = clock.seconds(baseline) if mine > LONG else 0.0
    is_long = theirs > LONG
    if is_long:
        yield (mine if mine < theirs else clock.seconds(work, mine)), theirs
    for number in itertools.count():
        is_repeated = not is_long and number % 2 == 1
        if is_repeated:
            work()
        mine = clock.seconds(work, mine)
        if theirs <= PAIRS_BUDGET or mine >= DECISIVE * theirs:
            if is_repeated:
                baseline()
            theirs = clock.seconds(baseline, theirs or None)
        yield mine, theirs


def _is_settled(ratios: list[float], wanted: float) -> bool:
    """Whether the pairs decide: most ratios are above the wanted one, or all below it; far off, if they are few."""
    if wanted == math.inf:
        return False
    if len(ratios) < LEAST_PAIRS:
        return min(ratios) > LOST ** (1 / len(ratios)) * wanted
    needed = CLEARLY * wanted if len(ratios) < ENOUGH_PAIRS else wanted
    return _quartiles(ratios)[0] >= wanted or max(ratios) < needed


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
