"""The elements that each rank needs along a dim, as numbers, and which rank sends which of them to whom; a picture."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mucudnn.convolution.geometry import EMPTY, Interval, intersect, length

OWN, WHOLE = -1, -2


@dataclass(frozen=True)
class Piece:
    """``length`` elements: those at ``start``, ``start + step``, ... of a source; fill where start is None.

    step is 1, -1 (reflected) or 0 (one element repeated). A need is made of pieces of the ``WHOLE`` dim. In a plan they
    are of the local tensor (``OWN``) or of a received interval, by its index, and positions count from its start.
    """

    length: int
    start: int | None = None
    step: int = 1
    source: int = WHOLE

    @functools.cached_property
    def reads(self) -> Interval:
        """The interval of the source that the piece reads."""
        if self.start is None or not self.length:
            return EMPTY
        last = self.start + self.step * (self.length - 1)
        return min(self.start, last), max(self.start, last) + 1


Need = tuple[Piece, ...]  # The need of one rank along the dim, in order: an index map. ``()`` is nothing.


def window(interval: Interval, extent: int) -> Need:
    """The need of one interval: positions below 0 and from ``extent`` on are fill."""
    inside = intersect(interval, (0, extent))
    if inside == EMPTY:
        return (Piece(length(interval)),) if length(interval) else ()
    pieces = (Piece(inside[0] - interval[0]), Piece(inside[1] - inside[0], inside[0]), Piece(interval[1] - inside[1]))
    return tuple(piece for piece in pieces if piece.length)


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's share of an exchange. Intervals in ``sends`` count from the start of the local tensor."""

    sends: tuple[tuple[int, Interval], ...]  # (peer, interval of the local tensor), by ascending peer and position.
    receives: tuple[tuple[int, Interval], ...]  # (peer, interval of the whole dim), by ascending peer and position.
    pieces: Need  # The needed pieces, of the local tensor and of received ones.
    own: int  # Elements owned along the dim.
    extent: int  # Elements needed along the dim.
    silent: bool  # Nothing moves between any two ranks of the axis.
    at_hand: tuple[tuple[Interval, Need], ...]
    """(interval of the need, its pieces), for the longest intervals of which nothing is received."""
    from_others: tuple[tuple[Interval, Need], ...]  # Likewise for those that are received.

    def extent_of(self, source: int) -> int:
        """Elements along the dim of what is owned (``OWN``) or of a received interval."""
        return self.own if source == OWN else length(self.receives[source][1])


@functools.lru_cache(maxsize=16384)
def wanted(need: Need) -> tuple[Interval, ...]:
    """The intervals that a need reads, disjoint and ascending."""
    merged: list[Interval] = []
    for start, stop in sorted(piece.reads for piece in need):
        if start == stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _moves(owned: Interval, need: Need) -> Iterator[Interval]:
    """The intervals that the owner gives for this need."""
    for interval in wanted(need):
        common = intersect(owned, interval)
        if common != EMPTY:
            yield common


@functools.lru_cache(maxsize=16384)
def make_exchange_plan(owned: tuple[Interval, ...], needs: tuple[Need, ...], rank: int) -> ExchangePlan:
    """The plan of ``rank``: what it sends, receives and assembles. ValueError for a position that no rank owns."""
    start, stop = owned[rank]
    sends = tuple(
        (peer, (first - start, last - start))
        for peer, need in enumerate(needs)
        if peer != rank
        for first, last in _moves(owned[rank], need)
    )
    receives = tuple(
        (peer, interval)
        for peer, theirs in enumerate(owned)
        if peer != rank
        for interval in _moves(theirs, needs[rank])
    )
    sources = [(OWN, owned[rank]), *((index, interval) for index, (_, interval) in enumerate(receives))]
    pieces = tuple(part for piece in needs[rank] for part in _by_source(piece, sources))
    silent = not any(
        peer != owner and any(_moves(theirs, need))
        for owner, theirs in enumerate(owned)
        for peer, need in enumerate(needs)
    )
    extent = sum(piece.length for piece in needs[rank])
    at_hand, from_others = (tuple(each for here, each in _rows(pieces) if here == wanted) for wanted in (True, False))
    return ExchangePlan(sends, receives, pieces, stop - start, extent, silent, at_hand, from_others)


def _rows(pieces: Need) -> Iterator[tuple[bool, tuple[Interval, Need]]]:
    """The longest rows of pieces that all need to be received, or all do not: whether they do not, interval, pieces."""
    start = 0
    for here, successive in itertools.groupby(pieces, lambda piece: piece.start is None or piece.source == OWN):
        row = tuple(successive)
        stop = start + sum(piece.length for piece in row)
        yield here, ((start, stop), row)
        start = stop


def _by_source(piece: Piece, sources: Sequence[tuple[int, Interval]]) -> Iterator[Piece]:
    """A piece of the whole dim, cut into pieces of the sources, each of which is given with its interval of the dim."""
    if piece.start is None:
        yield piece
        return
    position, left = piece.start, piece.length
    while left:
        at = next((each for each in sources if each[1][0] <= position < each[1][1]), None)
        if at is None:
            raise ValueError(f"position {position} is needed but no rank owns it")
        source, (start, stop) = at
        count = left if piece.step == 0 else min(left, stop - position if piece.step > 0 else position - start + 1)
        yield Piece(count, position - start, piece.step, source)
        position += count * piece.step
        left -= count


WIDEST = 96  # Characters of a row; a longer dim has several positions to a character.

LEGEND = "o owned, s owned and sent, ^ received, - neither"


def picture(owned: Sequence[Interval], needs: Sequence[Need]) -> str:
    """Draws what each rank owns, sends, receives and fills along the dim: rank r owns ``owned[r]``, needs ``needs[r]``.

    A character that covers several positions shows the most important of them: received before sent before owned.
    """
    extent = max((stop for _, stop in owned), default=0)
    scale = -(-extent // WIDEST) or 1
    title = f"{extent} positions, {len(owned)} ranks: {LEGEND}"
    rows = [title if scale == 1 else f"{title}; {scale} positions a character"]
    for rank, need in enumerate(needs):
        received = {
            peer: [common for source in wanted(need) if length(common := intersect(theirs, source))]
            for peer, theirs in enumerate(owned)
            if peer != rank
        }
        sent = [
            common
            for peer, other in enumerate(needs)
            for source in wanted(other)
            if peer != rank and length(common := intersect(owned[rank], source))
        ]
        row = ["-"] * -(-extent // scale)
        arrived = [interval for intervals in received.values() for interval in intervals]
        for mark, intervals in (("o", [owned[rank]]), ("s", sent), ("^", arrived)):
            for start, stop in intervals:
                for at in range(start // scale, -(-stop // scale) if stop > start else 0):
                    row[at] = mark
        counts = [f"{sum(map(length, parts))} from r{peer}" for peer, parts in received.items() if parts]
        filled = sum(piece.length for piece in need if piece.start is None)
        counts += [f"fills {filled}"] if filled else []
        rows.append(f"r{rank:<3} {''.join(row)}  {', '.join(counts)}".rstrip())
    return "\n".join(rows)
