"""What a training step keeps for its backward, by segments of its forward, within a limit of memory.

Forward is a row of units, and backward passes them in the reverse order. What a segment of units gives up after its
forward is missing from then on until its own backward, whose first work is to get it again. So while a segment is
computed, in forward or in backward, exactly what the segments before it have given up is missing: the choice is a
shortest path through the units with one resource. Rematerialization is chosen so for chains by Beaumont et al. (2019,
"Optimal checkpointing for heterogeneous chains"), where a segment may be divided again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GRAIN = 4096  # Bytes are counted in so many parts of the limit, to the safe side, so that there are few sums of them.


@dataclass(frozen=True)
class Retained:
    """A way to compute a segment of units.

    Attributes:
        first, end: the units from ``first`` to ``end - 1``.
        seconds: what it takes longer than to keep all.
        freed: bytes that it gives up between its forward and its backward.
        peak: the most bytes while it is computed, forward or backward, if the segments before it gave up nothing.
        how: names it to the caller.
    """

    first: int
    end: int
    seconds: float
    freed: int
    peak: int
    how: object = None


@dataclass(frozen=True)
class _Label:
    """A way to compute the first units."""

    cost: tuple[float, int]  # Seconds, and segments that give something up.
    last: Retained | None = None
    before: _Label | None = None


def cheapest_retention(ways: Iterable[Retained], units: int, limit: float) -> list[Retained] | None:
    """The segments in the order of the units that keep within the limit and take the least time together.

    Of ways equally fast, the one with the fewest segments that give something up. None where nothing keeps within it.

    Args:
        ways: of each unit, and of segments of several, the ways to compute it; every unit needs one.
        units: their number.
        limit: bytes. The optimum is exact for amounts that are rounded up, or for what is given up down, to 1/4096
            of it.
    """
    grain = 1 if limit in (math.inf, 0) else max(1, math.ceil(abs(limit) / GRAIN))
    from_unit: list[list[Retained]] = [[] for _ in range(units)]
    for way in ways:
        from_unit[way.first].append(way)
    needed = max((way.peak - limit for way in _smallest(from_unit)), default=0)
    most = math.ceil(needed / grain) if math.isfinite(needed) and needed > 0 else 0  # To give up more is of no use.
    labels: list[dict[int, _Label]] = [{} for _ in range(units + 1)]
    labels[0][0] = _Label((0.0, 0))
    for unit in range(units):
        for given_up, label in _undominated(labels[unit]):
            for way in from_unit[unit]:
                if way.peak - given_up * grain > limit:
                    continue
                total = max(0, min(most, given_up + way.freed // grain))
                cost = label.cost[0] + way.seconds, label.cost[1] + (way.freed > 0)
                known = labels[way.end].get(total)
                if known is None or cost < known.cost:
                    labels[way.end][total] = _Label(cost, way, label)
    if not labels[units]:
        return None
    best: _Label | None = min(labels[units].values(), key=lambda label: label.cost)
    found = []
    while best is not None and best.last is not None:
        found.append(best.last)
        best = best.before
    return found[::-1]


def _smallest(from_unit: Sequence[Sequence[Retained]]) -> list[Retained]:
    """Of each unit, the way that needs the most, by which it is known how much giving up may ever help."""
    return [max(ways, key=lambda way: way.peak) for ways in from_unit if ways]


def _undominated(labels: dict[int, _Label]) -> list[tuple[int, _Label]]:
    """Labels of which no other gives up as much in as little time."""
    kept: list[tuple[int, _Label]] = []
    for given_up, label in sorted(labels.items(), key=lambda each: each[0], reverse=True):
        if not kept or label.cost < kept[-1][1].cost:
            kept.append((given_up, label))
    return kept


def peak_of(segments: Sequence[Retained]) -> int:
    """The most bytes of a choice."""
    given_up = most = 0
    for way in segments:
        most = max(most, way.peak - given_up)
        given_up += way.freed
    return most


def least_limit(ways: Sequence[Retained], units: int) -> int:
    """The least number of bytes within which something keeps, to 1/1000."""
    high = max(way.peak for way in ways)
    steps = [math.floor(high * k / 1000) for k in range(1, 1001)]
    at = bisect.bisect_left(steps, True, key=lambda limit: cheapest_retention(ways, units, limit) is not None)
    return steps[min(at, len(steps) - 1)]
