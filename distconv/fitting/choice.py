"""Chooses how a call of a model keeps within a limit of memory in the least predicted time.

The call may run whole, with segments that are computed again in backward or moved off the device (`fitting/ways.py`),
or in parts that are computed one after another (`distconv.turns`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from distconv.fitting.ladders import partition_ladders
from distconv.fitting.timeline import Timeline
from distconv.fitting.ways import AGAIN, AWAY, SegmentWay, recompute_instead_of_moving, segment_options
from distconv.model.direct.chains.choice import Prices
from distconv.settings.partition import Partition
from distconv.turns.work import Followed, Work
from mucudnn.optimizer.retention import Retained, cheapest_retention, least_limit, least_seconds, peak_of
from mucudnn.sizes import format_bytes

MARGIN = 1.05  # Real peaks are at most so many times the predicted ones, where segments give something up.

PARTS_MARGIN = 1.03  # The same margin for a call that is computed in parts.

SLACK = 1.05  # The tensors of parts may exceed their limit by this factor: small ones stay on the device, uncounted.

MOST_FOLLOWED = 4_000  # Operators after which no further numbers of parts are tried: following one takes 1 to 2 ms.

TRIES = 4  # Limits of the parts' tensors that are tried, each corrected by what the parts took within the last.

HOST_SECONDS = {"cpu": 6e-5}
"""Seconds that the host takes for an operator of a part, by kind of device: the median of ten small networks
(benchmarks/fitting/networks.py) in four parts within half of their memory, on a processor; 32 to 94 microseconds."""

HOST_SECONDS_ELSEWHERE = 8e-5

LEAST_OPERATORS = 3  # In these networks a part has at least so many times as many operators as the whole call.

NEARLY = 1.1  # Where nothing fits, the fastest way is taken with which all takes at most so many times the least.

GAIN = 0.95  # Parts are followed, and again with segments computed again, if they may take less than this of the time.


@dataclass(frozen=True)
class Fit:
    """A way to compute a call.

    Attributes:
        peak: the most bytes of all tensors on the device.
        alone: the same without calls between forward and backward.
        slower: predicted time, relative to that of the whole call.
        ways: how segments give up memory, of the whole call or of each part.
        partition, memory: the parts in turn, and the limit of their tensors.
        fits: whether it keeps within the limit.
        moved: bytes that leave the device and return.
        kept: bytes on the device between forward and backward, besides those of before the call and of its results.
        untried: whether more parts were not followed, as that would take long.
        peaks: of the call with segments, by stage: its first tick in forward, and the most bytes in its forward and
            backward.
    """

    peak: int
    slower: float
    ways: tuple[SegmentWay, ...] = ()
    partition: Partition | None = None
    memory: int | None = None
    fits: bool = True
    moved: int = 0
    kept: int = 0
    untried: bool = False
    peaks: tuple[tuple[int, int], ...] = ()
    alone: int = 0

    def __str__(self) -> str:
        away = sum(way.kind == AWAY for way in self.ways)
        again = len(self.ways) - away
        kinds = [f"{again} segment{'s' * (again > 1)} recomputed in backward"] * bool(again)
        kinds += [f"the saved tensors of {away} segment{'s' * (away > 1)} offloaded"] * bool(away)
        how = "whole"
        if self.partition is not None:
            how = f"in parts {self.partition} in turn" + ", with tensors offloaded" * bool(self.moved)
        return ", ".join([how, " and ".join(kinds)] if kinds else [how])


def fit_line(found: Fit, timeline: Timeline, limit: float) -> str:
    """What a call does that runs in the chosen way, in one line."""
    whole = timeline.peak()
    line = f"runs {found}: at most {format_bytes(found.peak)}"
    if found.peak != whole:
        line += f" ({format_bytes(whole)} whole), about {found.slower:.2f} times the time of whole"
    if found.fits:
        return line
    untried = ", and more parts were not followed, as that takes long" if found.untried else ""
    return f"{line}; no way fits the {format_bytes(int(max(limit, 0)))} that are left{untried}"


Follow = Callable[[Partition, float, int, tuple[SegmentWay, ...]], tuple[int, Followed] | None]
"""Follows a call in parts, with segments of each part that give up memory, within a limit of all memory and a first
limit of the parts' tensors (see `largest_within`). None where the call cannot be followed."""


def ways_to_fit(
    timeline: Timeline,
    limit: float,
    extents: Mapping[str, int],
    follow: Follow,
    prices: Prices,
    device: str,
    grads: int,
    every: bool = False,
    beside: float = 0,
) -> list[Fit]:
    """The call whole, with segments that give something up, and in parts; the best first: of those that keep within
    the limit the one that takes the least predicted time; if none does, of those that take nearly the least memory.

    Args:
        timeline: of the call in one process.
        limit: bytes of all tensors on the device that the call may see.
        extents: those of the dims that can be cut, by axis.
        follow: is called for one partition at a time.
        prices: of the device.
        grads: bytes of the gradients of parameters.
        every: whether all ways are wanted; else no more are looked for once the best is known.
        beside: bytes of what else is on the device.
    """
    peak, total = timeline.peak(), max(sum(timeline.seconds), 1e-9)
    found = [Fit(peak, 1.0, fits=peak <= limit, kept=timeline.kept, alone=timeline.alone())]
    if every or not found[0].fits:
        options, units, ticks = segment_options(timeline, prices.received)
        gives_up, slowest = any(option.freed for option in options), math.inf
        chosen = cheapest_retention(options, units, limit / MARGIN) if gives_up else None
        if chosen is not None:
            found.append(_with_segments(chosen, ticks, total, timeline.kept, fits=True))
            if not every:  # Parts, too, move or compute again what they may not keep for backward.
                slowest = GAIN * found[-1].slower - least_seconds(options, units, timeline.between, limit) / total
        host = HOST_SECONDS.get(device, HOST_SECONDS_ELSEWHERE)
        found += _in_parts(timeline, limit, extents, follow, prices, grads, (total, host), (options, units), slowest)
        if chosen is None and gives_up and (every or not any(fit.fits for fit in found)):
            least = cheapest_retention(options, units, least_limit(options, units)) or []
            found.append(_with_segments(least, ticks, total, timeline.kept, fits=False))
    enough = NEARLY * (min(fit.peak for fit in found) + beside) - beside
    return sorted(found, key=lambda fit: (not fit.fits, 0 if fit.fits else max(fit.peak - enough, 0), fit.slower))


def _with_segments(chosen: list[Retained], ticks: Sequence[int], total: float, kept: int, fits: bool) -> Fit:
    """``ticks``: by unit, its first tick in forward; the unit of the last one is that between forward and backward."""
    ways = tuple(option.tag for option in chosen if isinstance(option.tag, SegmentWay))
    moved = sum(option.freed for option in chosen if isinstance(option.tag, SegmentWay) and option.tag.kind == AWAY)
    seconds = sum(option.seconds for option in chosen)
    freed = list(itertools.accumulate((option.freed for option in chosen), initial=0))
    kept = max(kept - freed[-1], 0)
    peaks = tuple((ticks[each.first], each.peak - before) for each, before in zip(chosen, freed, strict=False))
    alone = peak_of([each for each in chosen if each.first < len(ticks) - 1])
    return Fit(peak_of(chosen), 1 + seconds / total, ways, None, None, fits, 2 * moved, kept, peaks=peaks, alone=alone)


def largest_within(within: Callable[[int], Followed], first: int, limit: float) -> tuple[int, Followed]:
    """A limit of the parts' tensors with which the call takes nearly ``limit`` bytes, and no more, and what it takes;
    where none of the limits tried suffices, the one with which the call takes the least.

    Args:
        within: what a call in parts takes within a limit of the parts' tensors.
        first: the limit of the parts' tensors that is tried first.
    """
    tried = [(first, within(first))]
    for _ in range(TRIES - 1):
        memory, taken = tried[-1]
        room = min(limit, 1 << 62) / PARTS_MARGIN - taken.with_scratch
        moves = taken.moved > 0 or room < 0
        if not moves or 0 <= limit - taken.with_scratch < 2 * (PARTS_MARGIN - 1) * limit:
            break
        memory = int(memory + room) if memory + room >= 1 else memory // 8
        tried.append((memory, within(memory)))
        if tried[-1][1].with_scratch == taken.with_scratch:
            break
    fitting = [each for each in tried if each[1].with_scratch <= limit]
    return max(fitting, key=lambda each: each[0]) if fitting else min(tried, key=lambda each: each[1].with_scratch)


def with_others(taken: Callable[[int], Followed], later: int, summed: int, memory: int) -> Followed:
    """What parts take within a limit of their tensors. Calls between forward and backward need ``later`` bytes, and the
    sums of gradients over the ranks ``summed`` bytes, gradients included."""
    found = taken(memory)
    given = found.whole + found.results
    alone = max(found.with_scratch, given + summed)
    return replace(found, with_scratch=max(alone, given + found.kept + later if later else 0), alone=alone)


def _in_parts(
    timeline: Timeline,
    limit: float,
    extents: Mapping[str, int],
    follow: Follow,
    prices: Prices,
    grads: int,
    times: tuple[float, float],
    segments: tuple[list[Retained], int],
    slowest: float,
) -> list[Fit]:
    """The fewest parts that keep within the limit, behind fewer ones that were tried and do not; and the same parts
    with segments computed again, where that is faster.

    Args:
        times: seconds of the whole call, and those that the host takes for an operator of a part.
        segments: the options of `segment_options`, and the number of units.
        slowest: the time, relative to the whole call, that the host may take for parts; no more of them are followed.
    """
    total, host = times
    memory = int((min(limit, 1 << 62) - timeline.initial - grads - timeline.results) / SLACK)
    scratch, seen = max(timeline.scratch, default=0), 0  # Operators that were followed.
    found: list[Fit] = []

    def tried(
        partition: Partition, parts_limit: int, again: Sequence[Retained] = (), work: Work | None = None
    ) -> Followed | None:
        """Follows the call in parts, and adds that to what is found. ``work``: that of the parts without segments
        computed again."""
        ways = tuple(option.tag for option in again if isinstance(option.tag, SegmentWay))
        if (followed := follow(partition, limit, parts_limit, ways)) is None:
            return None
        parts_limit, taken = followed
        work = taken.work if work is None else work
        computed = work.operations * prices.operation + work.bytes * prices.written + work.operators * host
        seconds = computed + (taken.moved + taken.exchanged) * prices.received + sum(each.seconds for each in again)
        peak = taken.with_scratch
        fit = Fit(peak, seconds / total, ways, partition, parts_limit, peak <= limit, taken.moved, taken.kept)
        found.append(replace(fit, alone=taken.alone))
        return taken

    most = None
    for ladder in partition_ladders(extents):
        # Everything that one operator of a part reads and makes is on the device at once: fewer parts cannot fit.
        needed, before = timeline.largest, (0, math.inf)
        for partition in ladder:
            parts_limit, most = memory - scratch // partition.ranks, partition
            if parts_limit <= 0 or partition.ranks * parts_limit < needed:
                continue
            operators = len(timeline.seconds)
            if (total + host * LEAST_OPERATORS * operators * partition.ranks) / total > slowest:
                break
            seen += operators
            if seen > MOST_FOLLOWED and found:
                return [replace(fit, untried=True) for fit in found]
            taken = tried(partition, parts_limit)
            if taken is None:
                return found
            if found[-1].fits:
                options, units = segments
                options = _with_host(options, timeline, host * taken.work.operators)
                again = recompute_instead_of_moving(options, units, taken.moved, prices.received, parts_limit)
                gain = sum(2 * option.freed * prices.received - option.seconds for option in again) / total
                if found[-1].slower - gain < GAIN * found[-1].slower:
                    tried(partition, parts_limit, again, taken.work)
                return found
            here = partition.ranks, found[-1].peak
            if _least_ahead(before, here) > limit:
                break
            before = here
            needed = partition.ranks * taken.limited // 2  # More parts need at least half of this together.
    if not found and most is not None and slowest == math.inf:
        # Nothing can fit: the most parts may still take the least memory.
        tried(most, max(memory - scratch // most.ranks, timeline.largest // most.ranks))
    return found


def _least_ahead(before: tuple[int, float], here: tuple[int, int]) -> float:
    """The least bytes to expect of more parts: what parts divide shrinks with their number, and the rest, such as a
    mask that each part computes whole, does not.

    ``before``, ``here``: two numbers of parts, and the bytes that each takes.
    """
    (fewer, of_fewer), (more, of_more) = before, here
    return of_more - (of_fewer - of_more) * fewer / (more - fewer) if fewer else 0


def _with_host(options: Sequence[Retained], timeline: Timeline, host: float) -> list[Retained]:
    """The options, those to compute a segment again in parts with the time that the host takes for its operators:
    ``host`` is that for all operators of the call."""
    ticks = {record.segment: record.end - record.first for record in timeline.segments}
    each_tick = host / len(timeline.seconds)
    return [
        replace(each, seconds=each.seconds + each_tick * ticks[each.tag.segment])
        if isinstance(each.tag, SegmentWay) and each.tag.kind == AGAIN
        else each
        for each in options
    ]
