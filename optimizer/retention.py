"""Chooses which segments of forward free what they keep for backward, so that a training step fits a limit of memory.

Forward is a row of units, and backward passes them in the reverse order. Memory that a segment of units gives up after
its forward is free from then on until its own backward, which begins by getting it again. So while a segment is
computed, in forward or in backward, exactly what the segments before it have given up is free: the choice is a
shortest path through the units with one resource. Rematerialization is chosen so for chains by Beaumont et al. (2019,
"Optimal checkpointing for heterogeneous chains"), where a segment may be divided again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

GRAINS = 1024, 4096
"""Freed bytes are counted in so many parts of the limit, at least and at most, rounded down, so that there are few sums
of them: of many units the fewest."""

MOST_SUMS = 250_000  # For all units together, beyond the fewest parts of the limit.

LEAST_SHARE = 16  # The parts are those of a limit of at least one in so many bytes that have to be given up.


@dataclass(frozen=True)
class Retained:
    """An option: one way to compute a segment of units.

    Attributes:
        first, end: the units from ``first`` to ``end - 1``.
        seconds: that it takes longer than to keep all.
        freed: bytes that it gives up between its forward and its backward.
        peak: the most bytes while it is computed, forward or backward, if the segments before it gave up nothing.
        tag: anything by which the caller knows it again.
    """

    first: int
    end: int
    seconds: float
    freed: int
    peak: int
    tag: object = None


class _Choices:
    """The best choices of options for the first units, by how many grains of bytes they give up at least: the more, the
    dearer. ``width``: the numbers of grains."""

    def __init__(self, width: int) -> None:
        self.seconds = np.full(width, np.inf)
        self.segments = np.zeros(width, np.int32)  # Those that give something up: the fewest of choices equally fast.
        self.last = np.full(width, -1, np.int32)  # The number of the last option.
        self.before = np.zeros(width, np.int32)  # What the units before that option give up.

    def extend(self, earlier: _Choices, given: NDArray[np.int64], number: int, option: Retained) -> None:
        """Lets an option follow earlier choices, which give up ``given`` grains, where that is better."""
        seconds = earlier.seconds[given] + option.seconds
        segments = earlier.segments[given] + (option.freed > 0)
        fewer = (seconds == self.seconds) & (segments < self.segments) & (self.last >= 0)
        better = np.flatnonzero((seconds < self.seconds) | fewer)
        self.seconds[better], self.segments[better] = seconds[better], segments[better]
        self.last[better], self.before[better] = number, given[better]

    def end(self) -> None:
        """Frees the costs, when all options have followed."""
        del self.seconds, self.segments


def cheapest_retention(options: Iterable[Retained], units: int, limit: float) -> list[Retained] | None:
    """The options, in the order of the units, that keep within the limit and take the least time together.

    Of choices equally fast, the one with the fewest segments that give something up. None where no choice keeps the
    limit. Without a limit these are the cheapest segments of a row.

    Args:
        options: of each unit, and of segments of several units; every unit needs one of its own.
        units: their number.
        limit: bytes. The optimum is exact for freed bytes that are rounded down to a part of it (`GRAINS`); or, of a
            limit that is small beside the peak, to one of `LEAST_SHARE` of what has to be given up.
    """
    every, (fewest, largest) = [*options], GRAINS
    needed = max((option.peak - limit for option in every), default=0)
    needed = needed if math.isfinite(needed) and needed > 0 else 0  # To give up more would be of no use.
    grains = max(fewest, min(largest, MOST_SUMS // max(units, 1)))
    grain = max(1, math.ceil(max(min(abs(limit), needed), needed / LEAST_SHARE) / grains))
    width = math.ceil(needed / grain) + 1
    places = np.arange(width)
    from_unit: list[list[int]] = [[] for _ in range(units)]
    for number, option in enumerate(every):
        from_unit[option.first].append(number)
    choices = {0: _Choices(width)}
    choices[0].seconds[0] = 0
    for unit, numbers in enumerate(from_unit):
        if unit not in choices:
            continue
        for number in numbers:
            option = every[number]
            first = max(0, math.ceil((option.peak - limit) / grain)) if needed else 0
            if first < width:
                given = np.maximum(places - option.freed // grain, first)
                if option.end not in choices:
                    choices[option.end] = _Choices(width)
                choices[option.end].extend(choices[unit], given, number, option)
        choices[unit].end()
    found, unit, at = [], units, 0
    if units not in choices or math.isinf(choices[units].seconds[0]):
        return None
    while unit:
        option, at = every[choices[unit].last[at]], choices[unit].before[at]
        found.append(option)
        unit = option.first
    return found[::-1]


def least_seconds(options: Iterable[Retained], units: int, between: int, limit: float) -> float:
    """The least time in which segments give up so much that ``between``, the bytes between forward and backward, keeps
    within the limit, whatever the peaks within forward and backward; infinite where they cannot."""
    without_peaks = [replace(option, peak=0) for option in options]
    found = cheapest_retention([*without_peaks, Retained(units, units + 1, 0.0, 0, between)], units + 1, limit)
    return math.inf if found is None else sum(option.seconds for option in found)


def peak_of(choice: Sequence[Retained]) -> int:
    """The most bytes of a choice."""
    given_up = most = 0
    for option in choice:
        most = max(most, option.peak - given_up)
        given_up += option.freed
    return most


def least_limit(options: Sequence[Retained], units: int) -> int:
    """The least limit that some choice keeps, to 1/1000 of the largest peak."""
    high = max(option.peak for option in options)
    steps = [math.floor(high * k / 1000) for k in range(1, 1001)]
    at = bisect.bisect_left(steps, True, key=lambda limit: cheapest_retention(options, units, limit) is not None)
    return steps[min(at, len(steps) - 1)]
