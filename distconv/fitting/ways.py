"""How the segments of a call can take less memory: compute again in backward, or move off the device until then.

Between its forward and its backward, a segment *gives up* the storages that autograd alone keeps of it for backward.
The ticks at which such segments begin or end cut forward into *units*, so every segment is a row of whole units, and
backward passes the units in the reverse order. `mucudnn.optimizer.retention` chooses: each unit keeps all, or is in one
segment that gives something up. For each such option (`Retained`) it needs the seconds that the option adds, the bytes
that it gives up, and its peak: the most bytes on the device while these units are computed, in forward or in backward.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from distconv.fitting.timeline import Segment, SegmentRecord, Storage, Timeline
from mucudnn.optimizer.retention import Retained, cheapest_retention

LEAST = 1 / 256  # Segments that keep a smaller share of the peak are not considered.

AGAIN, AWAY = "computed again", "moved"


class SegmentWay(NamedTuple):
    """How a segment gives up what it keeps for backward; ``kind`` is `AGAIN` or `AWAY`."""

    segment: Segment
    kind: str
    buffers: tuple[str, ...]  # The names of those that its forward changes.
    moves_results: bool = False  # Whether its results are moved, too, as no later segment keeps them for backward.


class Options(NamedTuple):
    """The options of all units and segments, the number of units, and by unit its first tick in forward."""

    options: list[Retained]
    units: int
    ticks: list[int]


class _Candidate(NamedTuple):
    """A segment, and the storages that it may give up, by computing them again or by moving them."""

    record: SegmentRecord
    storages: list[Storage]
    kind: str


def segment_options(timeline: Timeline, byte_seconds: float) -> Options:
    """The options of a call. The ``tag`` of those that give something up is a `SegmentWay`. ``byte_seconds``: what it
    takes to move a byte off the device, or back."""
    call = _Ticks(timeline)
    candidates = _candidates(timeline, int(call.alive.max(initial=0)) * LEAST)
    ends = itertools.chain.from_iterable((each.record.first, each.record.end) for each in candidates)
    bounds = sorted({0, timeline.forward, *ends})
    units = len(bounds) - 1
    if units < 1:
        return Options([], 0, [])
    peaks = np.zeros(units, dtype=np.int64)
    unit_of = np.minimum(np.searchsorted(bounds, timeline.forward_tick, side="right"), units) - 1
    np.maximum.at(peaks, unit_of, call.alive + _still_referenced(timeline, candidates))
    options = [Retained(unit, unit + 1, 0.0, 0, peak) for unit, peak in enumerate(peaks.tolist())]
    unit_at = {bound: unit for unit, bound in enumerate(bounds)}
    for each in candidates:
        covered, backward = (unit_at[each.record.first], unit_at[each.record.end]), call.backward_of(each.record)
        if not len(backward):
            continue
        if each.kind == AWAY:
            options.append(call.moved(each, covered, backward, byte_seconds))
        elif (again := call.computed_again(each, covered, backward)) is not None:
            options.append(again)
    if timeline.later:  # A unit between forward and backward.
        options.append(Retained(units, units + 1, 0.0, 0, timeline.between))
    return Options(options, units + bool(timeline.later), bounds)


def recompute_instead_of_moving(
    options: Sequence[Retained], units: int, moved: int, byte_seconds: float, room: int
) -> list[Retained]:
    """The segments to compute again in backward so that what else would leave the device and return, ``moved`` bytes
    at ``byte_seconds`` each, takes the least time together with that.

    What a segment computes again has to be there until its backward ends: it takes at most half of ``room``.
    """
    again = [
        each
        for each in options
        if isinstance(each.tag, SegmentWay) and each.tag.kind == AGAIN and 2 * each.freed <= room
    ]
    free = [Retained(unit, unit + 1, 0.0, 0, 0) for unit in range(units)] + [replace(each, peak=0) for each in again]
    cheaper = [replace(each, seconds=each.seconds - 2 * byte_seconds * each.freed) for each in free]
    found = cheapest_retention(cheaper, units, math.inf) or []
    if 2 * sum(each.freed for each in found) > moved:  # Less is enough.
        all_moved = Retained(units, units + 1, 0.0, 0, moved)  # fits only where segments give up half as much
        found = cheapest_retention([*free, all_moved], units + 1, moved / 2) or found
    chosen = {(each.first, each.end, each.tag) for each in found if each.tag is not None}
    return [each for each in again if (each.first, each.end, each.tag) in chosen]


def _candidates(timeline: Timeline, least: float) -> list[_Candidate]:
    """Every segment that keeps more than ``least`` bytes for backward, once for each kind of way that is open to it."""
    # Those that autograd alone keeps from some tick in forward on.
    kept = [
        (number, x)
        for number, x in timeline.storages.items()
        if x.first_used is not None and x.released is not None and x.released < timeline.forward
    ]
    in_order_made = sorted(kept, key=lambda each: each[1].made)
    in_order_saved = sorted(kept, key=lambda each: each[1].save_number)
    found = []
    for record in timeline.segments:
        made = _between(in_order_made, "made", record.first, record.end)
        again = [x for number, x in made if number not in record.results]
        saved = _between(in_order_saved, "save_number", *record.saves)
        # A result that the segment's last operator saves stays: the operator after the segment reads it.
        away = [x for number, x in saved if number not in record.results or x.saved != record.end]
        repeatable = record.repeatable and not _written_by_last(x for _, x in saved)
        for kind, storages in ((AGAIN, again), (AWAY, away)):
            if sum(storage.size for storage in storages) > least and (kind == AWAY or repeatable):
                found.append(_Candidate(record, storages, kind))
    return found


def _written_by_last(saved: Iterable[Storage]) -> bool:
    """Whether the last operator that saves writes to what it has saved, as `rrelu` does to its noise.

    `torch.utils.checkpoint` ends a second forward at its last save, which is before such an operator is computed.
    """
    storages = list(saved)
    last = max((x.saved for x in storages if x.saved is not None), default=-1)
    return any(x.saved == last <= x.written for x in storages)


def _between(storages: Sequence[tuple[int, Storage]], name: str, first: int, end: int) -> Sequence[tuple[int, Storage]]:
    """The storages, sorted by the attribute ``name``, for which that is at least ``first`` and below ``end``."""
    at, until = (bisect.bisect_left(storages, each, key=lambda each: getattr(each[1], name)) for each in (first, end))
    return storages[at:until]


def _still_referenced(timeline: Timeline, candidates: Sequence[_Candidate]) -> Any:
    """By tick, the bytes that a segment may have given up before, but that the program still refers to."""
    given_up: dict[int, tuple[int, Storage]] = {}
    for each in candidates:
        for storage in each.storages:
            before, _ = given_up.get(id(storage), (each.record.end, storage))
            given_up[id(storage)] = min(before, each.record.end), storage
    change = [0] * (len(timeline.seconds) + 1)
    for end, storage in given_up.values():
        if storage.released is not None and storage.released >= end:
            change[end] += storage.size
            change[storage.released + 1] -= storage.size
    return np.cumsum(change, dtype=np.int64)[: len(timeline.seconds)]


class _Ticks:
    """The ticks of a call: the bytes at each, ``alive``, and which of backward belong to those of forward."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self.alive = timeline, np.array(timeline.alive(), dtype=np.int64)
        forward_tick = np.array(timeline.forward_tick[timeline.forward :], dtype=np.int64)
        order = forward_tick.argsort(kind="stable")
        self._backward, self._of_forward = order + timeline.forward, forward_tick[order]

    def backward_of(self, record: SegmentRecord) -> Any:
        """The ticks of the backward of a segment."""
        first, end = np.searchsorted(self._of_forward, (record.first, record.end))
        return self._backward[first:end]

    def moved(self, candidate: _Candidate, units: tuple[int, int], backward: Any, byte_seconds: float) -> Retained:
        """The option to move a segment's storages off the device."""
        record, storages, kind = candidate
        size = sum(storage.size for storage in storages)
        results = [self._timeline.storages[number] for number in record.results]
        moves_results = any(storage is result for storage in storages for result in results)
        way = SegmentWay(record.segment, kind, record.buffers, moves_results)
        peak = max(self._peak_in_forward(candidate), int(self.alive[backward].max()))
        return Retained(*units, 2 * size * byte_seconds, size, peak, way)

    def computed_again(self, candidate: _Candidate, units: tuple[int, int], backward: Any) -> Retained | None:
        """The option to compute a segment again in backward; None if that frees nothing."""
        record, storages, kind = candidate
        timeline, first, begins = self._timeline, record.first, backward.min()
        size = sum(storage.size for storage in storages)
        # The segment's inputs are kept for the second forward, even if nothing else keeps them.
        inputs = [timeline.storages[number] for number in record.inputs]
        kept_longer = sum(x.size for x in inputs if x.end is not None and first <= x.end < begins)
        if size <= kept_longer:
            return None
        # There are two of each result in its backward.
        results = sum(timeline.storages[number].size for number in record.results)
        before = self.alive[first - 1] - timeline.scratch[first - 1] if first else timeline.initial
        rise = self.alive[first : record.end].max() - before
        # Its second forward keeps the parameters that it gathers.
        gathered = sum(timeline.gathered.get(number, 0) for number in record.read)
        in_backward = self.alive[backward].max() + results + gathered
        peak = max(self._peak_in_forward(candidate), self.alive[begins] - size + rise + gathered, in_backward)
        way, seconds = SegmentWay(record.segment, kind, record.buffers), sum(timeline.seconds[first : record.end])
        return Retained(*units, seconds, size - kept_longer, int(peak), way)

    def _peak_in_forward(self, candidate: _Candidate) -> int:
        """The most bytes in a segment's forward, where what it gives up is free as soon as the program has released
        it."""
        record = candidate.record
        freed = np.zeros(record.end - record.first, dtype=np.int64)
        for storage in candidate.storages:
            at = (storage.released or 0) + 1 - record.first
            if 0 <= at < len(freed):
                freed[at] += storage.size
        return int((self.alive[record.first : record.end] - freed.cumsum()).max(initial=0))
