"""Chooses which links of a model's call fetch wide halos, and how wide. Computes with numbers only, without torch.

The links are divided into segments. Within a segment, halos of operands that were made before it are fetched once, as
wide as the links of the segment need, and the results are as wide as the next links need. At the end of a segment only
the ranks' own positions remain. A segment costs its exchanges, and the computation beyond the ranks' own positions.

The coverage of an activation says which positions ranks have along its sharded dims, their own and some beside them.
All are positions of the whole tensor: padding at its ends is not part of it, since layers pad there themselves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mucudnn.convolution.geometry import Interval, Window, length
from mucudnn.optimizer.retention import Retained, cheapest_retention


class Link(NamedTuple):
    """A function of a model that makes one activation."""

    operands: tuple[int, ...]  # The numbers of the links that make its operands; empty if it was made elsewhere.
    spans: tuple[Span, ...]  # The spans of the result.
    windows: tuple[Window, ...] | None
    """By span, which positions of the operand a position reads; None if the same position of each operand."""
    fetches: bool  # Whether it may fetch a wide halo of an operand.
    operations: float  # Multiplications and additions for each position of the spans.
    size: float  # Bytes of the result for each position.

    @property
    def exchanges(self) -> bool:
        """Whether it needs a halo."""
        return self.windows is not None and any(window.reach > 1 or window.padding for window in self.windows)


@dataclass(frozen=True)
class Prices:
    """Seconds of an exchange, of a byte that a rank receives, of an operation, and of a byte that a link writes."""

    exchange: float
    received: float
    operation: float
    written: float


@dataclass
class ChainSegment:
    """The halos and the cost of some successive links."""

    wanted: dict[int, Coverage] = field(default_factory=dict)
    """The coverage that an activation is to have, by the number of the link that makes it."""
    exchanges: int = 0  # Their number.
    received: float = 0.0  # The bytes that the rank which gets most receives by them.
    operations: float = 0.0  # The most multiplications and additions of a rank beyond its own positions.
    written: float = 0.0  # The most bytes that a rank writes beyond its own positions.

    def seconds(self, prices: Prices) -> float:
        """The cost in seconds."""
        return (
            self.exchanges * prices.exchange
            + self.received * prices.received
            + self.operations * prices.operation
            + self.written * prices.written
        )


def choose_chain(
    links: Sequence[Link], prices: Prices, most: float = math.inf, alone: Collection[int] = ()
) -> list[tuple[Coverage, ...] | None]:
    """By link the coverage to which it widens each operand; None for a link that widens none.

    Args:
        most: positions that a rank may have on a side beyond its own; it never has more than a neighbour owns.
        alone: the numbers of links of whose results ranks may only have their own positions.
    """
    if not links:
        return []
    begins = [0, *(at for at, link in enumerate(links) if link.exchanges)]
    begins = [*dict.fromkeys(begins), len(links)]

    def segments() -> Iterator[Retained]:
        for i in range(len(begins) - 1):
            for j in range(i + 1, len(begins)):
                segment = as_one_segment(links, begins[i], begins[j], most if j > i + 1 else None, alone)
                if segment is None:
                    break  # nor may a longer one be
                yield Retained(i, j, segment.seconds(prices), freed=1, peak=0)

    row = cheapest_retention(segments(), len(begins) - 1, math.inf)
    assert row is not None, "links alone have no limit"
    chosen = [begins[segment.first] for segment in row]
    wants: list[tuple[Coverage, ...] | None] = [None] * len(links)
    for first, last in zip(chosen, [*chosen[1:], len(links)], strict=True):
        segment = as_one_segment(links, first, last, None)
        assert segment is not None, "without a limit"
        for at in range(first, last):
            if links[at].fetches and not _is_alone(links, at, segment):
                wants[at] = tuple(segment.wanted[operand] for operand in links[at].operands)
    return wants


def _is_alone(links: Sequence[Link], at: int, segment: ChainSegment) -> bool:
    """Whether a layer needs only the halo that it would fetch by itself, for the rank's own positions."""
    link = links[at]
    if link.windows is None:
        return False
    own, (operand,) = of_own(link.spans), link.operands
    return segment.wanted[operand] == inputs_read(link.windows, own, links[operand].spans)


def as_one_segment(
    links: Sequence[Link], first: int, last: int, most: float | None, alone: Collection[int] = ()
) -> ChainSegment | None:
    """The links from ``first`` to ``last`` - 1 as one segment; None if a halo would be too wide.

    ``most`` and ``alone``: see `choose_chain`; None means no limit.
    """
    segment = ChainSegment()
    wanted = segment.wanted
    for at in range(last - 1, first - 1, -1):
        link = links[at]
        result = wanted.get(at) or of_own(link.spans)
        if link.operands and at in alone and result != of_own(link.spans):
            return None
        for operand in link.operands:
            x = links[operand]
            need = result if link.windows is None else inputs_read(link.windows, result, x.spans)
            wanted[operand] = need if operand not in wanted else joined(wanted[operand], need)
            if most is not None and not _fits(wanted[operand], x.spans, most):
                return None
    coverage: dict[int, Coverage] = {}
    for at in range(first, last):
        link = links[at]
        made: Coverage | None = None
        for operand in link.operands:
            x = links[operand]
            has = coverage.get(operand) or of_own(x.spans)
            if link.fetches:
                has = _fetched(segment, x, has, wanted[operand])
            coverage[operand] = has
            of_this = has if link.windows is None else reached(link.windows, has, x.spans, link.spans)
            made = of_this if made is None else in_both(made, of_this)
        if made is not None:
            coverage[at] = made
            beyond = _positions(made) - _positions(of_own(link.spans))
            segment.operations += beyond * link.operations
            segment.written += beyond * link.size
    return segment


def _fetched(segment: ChainSegment, x: Link, has: Coverage, wanted: Coverage) -> Coverage:
    for at, (have, want) in enumerate(zip(has, wanted, strict=True)):
        if not covers(have, want):
            owned = (*has[:at], x.spans[at].owned, *has[at + 1 :])
            has = (*has[:at], want, *has[at + 1 :])
            segment.exchanges += 1
            segment.received += (_positions(has) - _positions(owned)) * x.size
    return has


def _fits(coverage: Coverage, spans: Sequence[Span], most: float) -> bool:
    return all(
        max(own[0] - interval[0], interval[1] - own[1]) <= min(most, *map(length, span.owned))
        for intervals, span in zip(coverage, spans, strict=True)
        for interval, own in zip(intervals, span.owned, strict=True)
    )


def _positions(coverage: Coverage) -> int:
    """The number of positions on the rank that has most."""
    return math.prod(max(map(length, intervals)) for intervals in coverage)


Coverage = tuple[tuple[Interval, ...], ...]  # By span, then by rank along it: the interval that the rank has.


class Span(NamedTuple):
    """A sharded dim of space."""

    dim: int  # The dim of the tensor.
    axes: tuple[int, ...]  # The axes of the mesh that shard it.
    extent: int  # The extent of the whole tensor.
    owned: tuple[Interval, ...]  # The interval of each rank along the axes; none is empty.
    here: int  # The index of this rank in ``owned``.


def of_own(spans: Sequence[Span]) -> Coverage:
    """The coverage where every rank has its own positions alone."""
    return tuple(span.owned for span in spans)


@functools.lru_cache(maxsize=65536)
def in_both(some: Coverage, others: Coverage) -> Coverage:
    """The intersection of two coverages with the same spans."""
    return tuple(
        tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
        for one, other in zip(some, others, strict=True)
    )


@functools.lru_cache(maxsize=65536)
def joined(some: Coverage, others: Coverage) -> Coverage:
    """The least coverage that contains both; each rank's intervals overlap."""
    return tuple(
        tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(one, other, strict=True))
        for one, other in zip(some, others, strict=True)
    )


def covers(coverage: Sequence[Interval], wanted: Sequence[Interval]) -> bool:
    """Whether every rank has all wanted positions along a span."""
    return all(a[0] <= b[0] and b[1] <= a[1] for a, b in zip(coverage, wanted, strict=True))


@functools.lru_cache(maxsize=65536)
def reached(
    windows: tuple[Window, ...], coverage: Coverage, inputs: tuple[Span, ...], outputs: tuple[Span, ...]
) -> Coverage:
    """The outputs of a layer that can be computed from the coverage of its input; an interval may be reversed."""
    return tuple(
        tuple(_reached(window, interval, x.extent, y.extent) for interval in intervals)
        for window, intervals, x, y in zip(windows, coverage, inputs, outputs, strict=True)
    )


@functools.lru_cache(maxsize=65536)
def inputs_read(windows: tuple[Window, ...], wanted: Coverage, inputs: tuple[Span, ...]) -> Coverage:
    """The inputs that wanted outputs of a layer read, joined with the ranks' own inputs."""
    return tuple(
        tuple(_read(window, interval, own, x.extent) for interval, own in zip(intervals, x.owned, strict=True))
        for window, intervals, x in zip(windows, wanted, inputs, strict=True)
    )


def _reached(window: Window, coverage: Interval, extent: int, outputs: int) -> Interval:
    start, stop = coverage
    first = -(-(start + window.padding) // window.stride) if start > 0 else 0
    last = (stop + window.padding - window.reach) // window.stride + 1 if stop < extent else outputs
    return first, last


def _read(window: Window, wanted: Interval, own: Interval, extent: int) -> Interval:
    start, stop = window.inputs(wanted)
    return min(own[0], max(0, start)), max(own[1], min(extent, stop))
