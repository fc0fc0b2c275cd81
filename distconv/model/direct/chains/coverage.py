"""Coverage: the positions that ranks have along the sharded dims of an activation, their own and some beside them.

All are positions of the whole tensor: padding at its ends is not part of a coverage, since layers pad there themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from mucudnn.convolution.geometry import Interval, Window

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
