"""The ways to compute the segments of a call: keep all for backward, compute again, or move away meanwhile."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from distconv.fitting.timeline import Extent, Segment, Storage, Timeline
from mucudnn.optimizer.retention import Retained, cheapest_retention

LEAST = 1 / 256  # Segments that keep a smaller share of the peak are not considered.

AGAIN, AWAY = "computed again", "moved"


class Way(NamedTuple):
    """How a segment gives up what it keeps for backward; ``how`` is `AGAIN` or `AWAY`."""

    segment: Segment
    how: str
    buffers: tuple[str, ...]  # Those that its forward changes.
    results: bool = False  # Whether its results leave, too, as no later segment keeps them for backward.


def ways_of(timeline: Timeline, moved: float) -> tuple[list[Retained], int]:
    """All ways, and the number of units. ``moved``: seconds for a byte that leaves the device or comes back."""
    alive = timeline.alive()
    least = max(alive, default=0) * LEAST
    every = [(number, storage) for number, storage in timeline.storages.items() if _is_kept(timeline, storage)]
    by_birth = sorted(every, key=lambda each: each[1].born)
    by_save = sorted(every, key=lambda each: each[1].save)
    given_up = []
    for extent in timeline.extents:
        born = _within(by_birth, "born", extent.first, extent.end)
        of_backward = [x for number, x in born if number not in extent.made]
        # Results that the last operator has saved are there for the next one.
        saved = _within(by_save, "save", *extent.saves)
        saved_last = [x for number, x in saved if number not in extent.made or x.saved != extent.end]
        for how, own in ((AGAIN, of_backward), (AWAY, saved_last)):
            if sum(storage.size for storage in own) > least and (how == AWAY or extent.again):
                given_up.append((extent, own, how))
    bounds = sorted({0, timeline.forward, *itertools.chain.from_iterable((e.first, e.end) for e, *_ in given_up)})
    units = len(bounds) - 1
    if units < 1:
        return [], 0
    late = _late(timeline, [(extent, kept) for extent, kept, _ in given_up])
    peaks = [0] * units
    for tick, (place, now) in enumerate(zip(timeline.place, alive, strict=True)):
        unit = min(bisect.bisect_right(bounds, place), units) - 1
        peaks[unit] = max(peaks[unit], now + late[tick])
    ways = [Retained(unit, unit + 1, 0.0, 0, peak) for unit, peak in enumerate(peaks)]
    for extent, kept, how in given_up:
        covered = bounds.index(extent.first), bounds.index(extent.end)
        backward = [t for t in range(timeline.forward, len(alive)) if extent.first <= timeline.place[t] < extent.end]
        if backward:
            ways += _way(timeline, alive, extent, kept, how, covered, backward, moved)
    return ways, units


def again_instead_of_moved(ways: Sequence[Retained], units: int, moved: int, price: float, room: int) -> list[Retained]:
    """The segments to compute again where else so many bytes leave the device and come back, each byte in ``price``
    seconds: those with which that takes the least time.

    What a segment computes again has to be there until its backward ends: it takes at most half of ``room``.
    """
    again = [way for way in ways if isinstance(way.how, Way) and way.how.how == AGAIN and 2 * way.freed <= room]
    free = [Retained(unit, unit + 1, 0.0, 0, 0) for unit in range(units)] + [replace(way, peak=0) for way in again]
    cheaper = [replace(way, seconds=way.seconds - 2 * price * way.freed) for way in free]
    found = cheapest_retention(cheaper, units, math.inf) or []
    if 2 * sum(way.freed for way in found) > moved:  # Less is enough.
        all_moved = Retained(units, units + 1, 0.0, 0, moved)  # fits only where segments give up half as much
        found = cheapest_retention([*free, all_moved], units + 1, moved / 2) or found
    chosen = {(way.first, way.end, way.how) for way in found if way.how is not None}
    return [way for way in again if (way.first, way.end, way.how) in chosen]


def _late(timeline: Timeline, given_up: Sequence[tuple[Extent, Sequence[Storage]]]) -> list[int]:
    """By tick, bytes that may have been given up, and that the program keeps for a while."""
    first: dict[int, tuple[int, Storage]] = {}
    for extent, kept in given_up:
        for storage in kept:
            before, _ = first.get(id(storage), (extent.end, storage))
            first[id(storage)] = min(before, extent.end), storage
    change = [0] * (len(timeline.seconds) + 1)
    for end, storage in first.values():
        if storage.died is not None and storage.died >= end:
            change[end] += storage.size
            change[storage.died + 1] -= storage.size
    return list(itertools.accumulate(change))


def _within(storages: Sequence[tuple[int, Storage]], what: str, first: int, end: int) -> Sequence[tuple[int, Storage]]:
    """Those of some storages, sorted by what is named, of which that is at least ``first`` and below ``end``: the
    storages that a segment makes, or that it is the last one to let autograd keep.
    """
    at, until = (bisect.bisect_left(storages, each, key=lambda each: getattr(each[1], what)) for each in (first, end))
    return storages[at:until]


def _is_kept(timeline: Timeline, storage: Storage) -> bool:
    """Whether it is kept for backward alone, from some tick in forward on."""
    return storage.used is not None and storage.died is not None and storage.died < timeline.forward


def _way(
    timeline: Timeline,
    alive: Sequence[int],
    extent: Extent,
    kept: Sequence[Storage],
    how: str,
    units: tuple[int, int],
    backward: Sequence[int],
    moved: float,
) -> list[Retained]:
    """The way to give up what a segment keeps; none if it gives up nothing. ``backward``: the segment's ticks there."""
    size = sum(storage.size for storage in kept)
    released, in_forward, gone = 0, 0, dict[int, int]()
    for storage in kept:
        gone[(storage.died or 0) + 1] = gone.get((storage.died or 0) + 1, 0) + storage.size
    for tick in range(extent.first, extent.end):
        released += gone.get(tick, 0)
        in_forward = max(in_forward, alive[tick] - released)
    in_backward = max(alive[tick] for tick in backward)
    way = Way(extent.segment, how, extent.buffers)
    if how == AWAY:
        own = [timeline.storages[number] for number in extent.made]
        way = way._replace(results=any(storage is each for storage in own for each in kept))
        return [Retained(*units, 2 * size * moved, size, max(in_forward, in_backward), way)]
    begins = backward[0]
    longer = sum(  # Its inputs are kept for the second time, also if nothing else keeps them.
        storage.size
        for storage in (timeline.storages[number] for number in extent.given)
        if storage.end is not None and extent.first <= storage.end < begins
    )
    if size <= longer:
        return []
    results = sum(timeline.storages[number].size for number in extent.made)  # There are two of each in its backward.
    before = alive[extent.first - 1] - timeline.scratch[extent.first - 1] if extent.first else timeline.whole
    rise = max(alive[extent.first : extent.end]) - before
    peak = max(in_forward, alive[begins] - size + rise, in_backward + results)
    return [Retained(*units, sum(timeline.seconds[extent.first : extent.end]), size - longer, peak, way)]
