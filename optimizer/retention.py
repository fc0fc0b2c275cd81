"""Chooses which segments of forward free what they keep for backward, so that a training step fits a limit of memory.

Forward is a row of units, and backward passes them in the reverse order. Memory that a segment of units gives up after
its forward is free from then on until its own backward, which begins by getting it again. So while a segment is
computed, in forward or in backward, exactly what the segments before it have given up is free: the choice is a
shortest path through the units with one resource. Rematerialization is chosen so for chains by Beaumont et al. (2019,
"Optimal checkpointing for heterogeneous chains"), where a segment may be divided again.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

GRAINS = 1024, 4096
"""Freed bytes are counted in so many parts of the limit, at least and at most, rounded down, so that there are few sums
of them: of many units the fewest, as more take a second of a call of 150 units and save 0.3 % of what is added."""

MOST_SUMS = 250_000  # For all units together, beyond the fewest parts of the limit.


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


@dataclass(frozen=True)
class _Label:
    """A choice of options for the first units."""

    cost: tuple[float, int]  # Seconds, and segments that give something up.
    last: Retained | None = None
    before: _Label | None = None


def cheapest_retention(options: Iterable[Retained], units: int, limit: float) -> list[Retained] | None:
    """The options, in the order of the units, that keep within the limit and take the least time together.

    Of choices equally fast, the one with the fewest segments that give something up. None where no choice keeps the
    limit. Without a limit these are the cheapest segments of a row.

    Args:
        options: of each unit, and of segments of several units; every unit needs one of its own.
        units: their number.
        limit: bytes. The optimum is exact for freed bytes that are rounded down to a part of it: see `GRAINS`.
    """
    fewest, largest = GRAINS
    grains = max(fewest, min(largest, MOST_SUMS // max(units, 1)))
    grain = 1 if limit in (math.inf, 0) else max(1, math.ceil(abs(limit) / grains))
    from_unit: list[list[Retained]] = [[] for _ in range(units)]
    for option in options:
        from_unit[option.first].append(option)
    needed = max((option.peak - limit for option in itertools.chain.from_iterable(from_unit)), default=0)
    most = math.ceil(needed / grain) if math.isfinite(needed) and needed > 0 else 0  # More would be of no use.
    labels: list[dict[int, _Label]] = [{} for _ in range(units + 1)]
    labels[0][0] = _Label((0.0, 0))
    for unit in range(units):
        for given_up, label in _undominated(labels[unit]):
            for option in from_unit[unit]:
                if option.peak - given_up * grain > limit:
                    continue
                total = max(0, min(most, given_up + option.freed // grain))
                cost = label.cost[0] + option.seconds, label.cost[1] + (option.freed > 0)
                known = labels[option.end].get(total)
                if known is None or cost < known.cost:
                    labels[option.end][total] = _Label(cost, option, label)
    if not labels[units]:
        return None
    best: _Label | None = min(labels[units].values(), key=lambda label: label.cost)
    found = []
    while best is not None and best.last is not None:
        found.append(best.last)
        best = best.before
    return found[::-1]


def least_seconds(options: Iterable[Retained], units: int, between: int, limit: float) -> float:
    """The least time in which segments give up so much that ``between``, the bytes between forward and backward, keeps
    within the limit, whatever the peaks within forward and backward; infinite where they cannot."""
    without_peaks = [replace(option, peak=0) for option in options]
    found = cheapest_retention([*without_peaks, Retained(units, units + 1, 0.0, 0, between)], units + 1, limit)
    return math.inf if found is None else sum(option.seconds for option in found)


def _undominated(labels: dict[int, _Label]) -> list[tuple[int, _Label]]:
    """Labels of which no other gives up as much in as little time."""
    kept: list[tuple[int, _Label]] = []
    for given_up, label in sorted(labels.items(), key=lambda each: each[0], reverse=True):
        if not kept or label.cost < kept[-1][1].cost:
            kept.append((given_up, label))
    return kept


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
