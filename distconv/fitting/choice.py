"""Chooses how a call of a model keeps within a limit of all memory: in the least time by the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distconv.fitting.timeline import Timeline
from distconv.fitting.ways import AWAY, Way, again_instead_of_moved, ways_of
from distconv.model.direct.chains.choice import Prices
from distconv.settings.partition import Partition
from distconv.turns.following import Followed
from mucudnn.optimizer.retention import Retained, cheapest_retention, least_limit, peak_of

MARGIN = 1.05  # Predicted peaks of segments that give something up are at most so much too small.

PARTS_MARGIN = 1.03  # Those of parts are.

SLACK = 1.05  # The tensors of parts may exceed a limit by this factor: small ones stay on the device, uncounted.

MOST_PARTS = 32  # Along one dim; each one more costs a thread, and all operators once more.

MOST_FOLLOWED = 4_000  # Operators, after which no further parts are tried: to follow each takes 1 to 2 ms.

TRIES = 4  # Limits of the tensors of parts that are tried, each corrected by how much less or more memory they take.

HOST = {"cpu": (2.2e-4, 4e-4)}
"""Seconds that the host takes for an operator of a part, in inference and in training, by kind of device: what small
networks in eight parts take beyond one process."""

HOST_ELSEWHERE = 3e-4, 5e-4

MOVING = 1.6  # Operators take the host so much longer where the parts' tensors leave the device.

GAIN = 0.97  # Parts are followed once more with segments computed again where that may take so much of the time.


@dataclass(frozen=True)
class Fit:
    """A way to compute a call.

    Attributes:
        peak: the most bytes of all tensors on the device.
        slower: predicted time, relative to that of the whole call.
        ways: what segments give up, of the whole call or of each part.
        partition, memory: of parts in turn, and the limit of their tensors.
        fits: whether it keeps within the limit; else it is what takes the least memory.
        moved: bytes that leave the device and come back.
        untried: whether more parts were not followed, as that would take long.
    """

    peak: int
    slower: float
    ways: tuple[Way, ...] = ()
    partition: Partition | None = None
    memory: int | None = None
    fits: bool = True
    moved: int = 0
    untried: bool = False

    def __str__(self) -> str:
        away = sum(way.how == AWAY for way in self.ways)
        again = len(self.ways) - away
        kinds = [f"{again} segment{'s' * (again > 1)} computed again in backward"] * bool(again)
        kinds += [f"what {away} segment{'s keep' if away > 1 else ' keeps'} moved off the device meanwhile"] * bool(
            away
        )
        how = "whole"
        if self.partition is not None:
            how = f"as parts {self.partition} in turn" + ", which leave the device meanwhile" * bool(self.moved)
        return ", ".join([how, " and ".join(kinds)] if kinds else [how])


TakenWithin = Callable[[int], Followed]
"""What the parts of a call take within a limit of their tensors."""

Follow = Callable[[Partition, float, int, tuple[Way, ...]], tuple[int, Followed] | None]
"""Follows a call under a partition, within a limit of all memory, as `largest_within` does, of which each part gives up
what some segments keep; None where that is not possible."""


def ways_to_fit(
    timeline: Timeline,
    limit: float,
    extents: Mapping[str, int],
    follow: Follow,
    prices: Prices,
    device: str,
    grads: int,
    every: bool = False,
) -> list[Fit]:
    """The call whole, with segments that give something up, and in parts; the best first: of those that keep within
    the limit the one that takes the least predicted time, and if there are none, the one that takes least memory.

    Args:
        timeline: of the call in one process.
        limit: bytes of all tensors on the device that the call may see.
        extents: those of the dims that can be cut, by axis.
        follow: is asked for one partition at a time.
        prices: of the device.
        grads: bytes of the gradients of parameters.
        every: whether all are asked for; else only as many as the best one takes.
    """
    peak, total = max(timeline.alive(), default=timeline.whole), max(sum(timeline.seconds), 1e-9)
    found = [Fit(peak, 1.0, fits=peak <= limit)]
    if every or not found[0].fits:
        ways, units = ways_of(timeline, prices.received)
        gives_up = any(way.freed for way in ways)
        chosen = cheapest_retention(ways, units, limit / MARGIN) if gives_up else None
        if chosen is not None:
            found.append(_fit_of(chosen, total, True))
        trained = len(timeline.seconds) > timeline.forward
        host = HOST.get(device, HOST_ELSEWHERE)[trained] * len(timeline.seconds)
        if every or not any(fit.fits and fit.slower <= (total + 2 * host) / total for fit in found):
            found += _in_parts(timeline, limit, extents, follow, prices, grads, (total, host), (ways, units))
        if chosen is None and gives_up and (every or not any(fit.fits for fit in found)):
            found.append(_fit_of(cheapest_retention(ways, units, least_limit(ways, units)) or [], total, False))
    return sorted(found, key=lambda fit: (not fit.fits, fit.slower if fit.fits else fit.peak))


def _fit_of(chosen: list[Retained], total: float, fits: bool) -> Fit:
    own = tuple(way.how for way in chosen if isinstance(way.how, Way))
    moved = sum(way.freed for way in chosen if isinstance(way.how, Way) and way.how.how == AWAY)
    return Fit(peak_of(chosen), 1 + sum(way.seconds for way in chosen) / total, own, fits=fits, moved=2 * moved)


def largest_within(within: TakenWithin, own: int, limit: float) -> tuple[int, Followed]:
    """A limit of the parts' tensors with which they keep within ``limit``, and nearly take it, and what they take; or
    that with which they take the least. It begins with ``own``.
    """
    tried = [(own, within(own))]
    for _ in range(TRIES - 1):
        own, taken = tried[-1]
        room = min(limit, 1 << 62) / PARTS_MARGIN - taken.with_scratch
        moves = taken.moved > 0 or room < 0
        if not moves or 0 <= limit - taken.with_scratch < 2 * (PARTS_MARGIN - 1) * limit:
            break
        following = int(own + room) if own + room >= 1 else own // 8
        tried.append((following, within(following)))
        if tried[-1][1].with_scratch == taken.with_scratch:
            break
    fitting = [each for each in tried if each[1].with_scratch <= limit]
    return max(fitting, key=lambda each: each[0]) if fitting else min(tried, key=lambda each: each[1].with_scratch)


def _in_parts(
    timeline: Timeline,
    limit: float,
    extents: Mapping[str, int],
    follow: Follow,
    prices: Prices,
    grads: int,
    times: tuple[float, float],
    segments: tuple[list[Retained], int],
) -> list[Fit]:
    """The fewest parts that keep within the limit, after some that do not; and with segments computed again, where that
    is faster.

    All that one operator of a part needs is on the device at once: so many parts there are at least.
    """
    total, host = times
    memory = int((min(limit, 1 << 62) - timeline.whole - grads - timeline.results) / SLACK)
    scratch, asked = max(timeline.scratch, default=0), 0
    found: list[Fit] = []

    def followed(partition: Partition, own: int, again: Sequence[Retained] = (), times: float = 0.0) -> Followed | None:
        """What parts take; adds them to what is found. ``times``: the operations of parts without segments computed
        again, relative to those of the whole call."""
        ways = tuple(way.how for way in again if isinstance(way.how, Way))
        if (tried := follow(partition, limit, own, ways)) is None:
            return None
        own, taken = tried
        times = times or (taken.operations / timeline.operations if timeline.operations else 1.0)
        computed = (total + sum(way.seconds for way in again)) * times
        host_of_parts = host * (1 + _share_of(timeline, ways)) * partition.ranks * (MOVING if taken.moved else 1)
        seconds = computed + host_of_parts + (taken.moved + taken.exchanged) * prices.received
        peak = taken.with_scratch
        found.append(Fit(peak, seconds / total, ways, partition, own, peak <= limit, taken.moved))
        return taken

    most = None
    for ladder in ladders(extents):
        needed = timeline.largest
        for partition in ladder:
            own, most = memory - scratch // partition.ranks, partition
            if own <= 0 or partition.ranks * own < needed:
                continue
            asked += len(timeline.seconds)
            if asked > MOST_FOLLOWED and found:
                return [replace(fit, untried=True) for fit in found]
            taken = followed(partition, own)
            if taken is None:
                return found
            if found[-1].fits:
                again = again_instead_of_moved(*segments, taken.moved, prices.received, own)
                gain = sum(2 * way.freed * prices.received - way.seconds for way in again) / total
                if found[-1].slower - gain < GAIN * found[-1].slower:
                    followed(partition, own, again, taken.operations / max(timeline.operations, 1))
                return found
            needed = partition.ranks * taken.limited // 2  # Not all that a part takes becomes less with more parts.
    if not found and most is not None:  # Nothing can fit: the most parts may still take the least memory.
        followed(most, max(memory - scratch // most.ranks, timeline.largest // most.ranks))
    return found


def _share_of(timeline: Timeline, ways: Sequence[Way]) -> float:
    """The share of a call's operators that are in the segments of some ways."""
    own = {way.segment for way in ways}
    return sum(each.end - each.first for each in timeline.extents if each.segment in own) / len(timeline.seconds)


def ladders(extents: Mapping[str, int]) -> Iterator[list[Partition]]:
    """Lists of partitions of 2, 4, 8... parts: of samples, which exchange the least; of the longest dim; of both."""
    samples = _counts(extents.get("sample", 1))
    yield [Partition((("sample", parts),)) for parts in samples]
    space = [name for name in extents if name != "sample"]
    if space:
        name = max(space, key=extents.__getitem__)
        yield [Partition(((name, parts),)) for parts in _counts(extents[name])]
        if samples:
            yield [Partition((("sample", samples[-1]), (name, parts))) for parts in _counts(extents[name])]


def _counts(extent: int) -> list[int]:
    doubled = [1 << k for k in range(1, 6) if 1 << k <= min(extent, MOST_PARTS)]
    return sorted({*doubled, extent}) if 1 < extent <= MOST_PARTS else doubled
