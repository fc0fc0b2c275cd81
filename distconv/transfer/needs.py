"""Needs: what each rank needs along a dim, who owns it, and so what moves between whom; numbers only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mucudnn.convolution.geometry import EMPTY, Interval, intersect, length


@dataclass(frozen=True)
class Piece:
    """``length`` needed elements: those at ``start``, ``start + step``, ... of the whole dim; fill where start is None.

    step is 1, -1 (reflected) or 0 (one element repeated).
    """

    length: int
    start: int | None = None
    step: int = 1

    @property
    def source(self) -> Interval:
        """The interval of the dim that the piece reads."""
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


OWN, FILL = -1, -2


@dataclass(frozen=True)
class Segment:
    """Some of the fetched tensor: ``length`` elements from ``start`` by ``step`` of a block.

    ``block`` is ``OWN`` (the local tensor), ``FILL``, or the index of a received block.
    """

    block: int
    start: int
    length: int
    step: int


@dataclass(frozen=True)
class Stretch:
    """Successive segments, and their interval of the fetched tensor."""

    interval: Interval
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's share of an exchange. Positions in ``sends`` and ``segments`` count from the start of their block."""

    sends: tuple[tuple[int, Interval], ...]  # (peer, interval of the local tensor), by ascending peer and position.
    receives: tuple[tuple[int, Interval], ...]
    """(peer, interval of the whole dim), by ascending peer and position: the received blocks."""
    segments: tuple[Segment, ...]
    own: int  # Elements owned along the dim.
    extent: int  # Elements needed along the dim.
    silent: bool  # Nothing moves between any two ranks of the axis.
    at_hand: tuple[Stretch, ...]  # The segments that read no received block, joined to as few stretches as possible.
    from_others: tuple[Stretch, ...]  # The segments that read a received block, joined likewise.

    def extent_of(self, block: int) -> int:
        """Elements along the dim of what is owned (``OWN``) or of a received block."""
        return self.own if block == OWN else length(self.receives[block][1])


@functools.lru_cache(maxsize=16384)
def wanted(need: Need) -> tuple[Interval, ...]:
    """The sources of a need, disjoint and ascending."""
    merged: list[Interval] = []
    for start, stop in sorted(piece.source for piece in need):
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
    """The plan of ``rank``: what it sends, receives and assembles. ValueError for a source that no rank owns."""
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
    blocks = [(OWN, owned[rank]), *((index, interval) for index, (_, interval) in enumerate(receives))]
    segments = tuple(segment for piece in needs[rank] for segment in _segments(piece, blocks))
    silent = not any(
        peer != owner and any(_moves(theirs, need))
        for owner, theirs in enumerate(owned)
        for peer, need in enumerate(needs)
    )
    extent = sum(piece.length for piece in needs[rank])
    at_hand, from_others = ([each for here, each in _stretches(segments) if here == wanted] for wanted in (True, False))
    return ExchangePlan(sends, receives, segments, stop - start, extent, silent, tuple(at_hand), tuple(from_others))


def _stretches(segments: Sequence[Segment]) -> Iterator[tuple[bool, Stretch]]:
    """The longest stretches of segments that this rank has, or has not, itself; True for those that it has."""
    start = 0
    for here, successive in itertools.groupby(segments, lambda segment: segment.block in (OWN, FILL)):
        group = tuple(successive)
        stop = start + sum(segment.length for segment in group)
        yield here, Stretch((start, stop), group)
        start = stop


def _segments(piece: Piece, blocks: Sequence[tuple[int, Interval]]) -> Iterator[Segment]:
    if piece.start is None:
        yield Segment(FILL, 0, piece.length, 1)
        return
    position, left = piece.start, piece.length
    while left:
        at = next((block for block in blocks if block[1][0] <= position < block[1][1]), None)
        if at is None:
            raise ValueError(f"position {position} is needed but no rank owns it")
        block, (start, stop) = at
        count = left if piece.step == 0 else min(left, stop - position if piece.step > 0 else position - start + 1)
        yield Segment(block, position - start, count, piece.step)
        position += count * piece.step
        left -= count
