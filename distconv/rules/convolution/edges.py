"""Edges: the outputs of a rank that need halos. All others are computed while the halos travel. Numbers only.

A rank convolves its own inputs alone, with zeros around them, and corrects the result when the halos have arrived.
In forward, it computes the few outputs at an end that read a halo again, with the halo. In backward, it adds the
contributions of the halo's gradients to the gradients of the few inputs that they reach, and to the weight's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distconv.transfer.needs import Need, Piece
from mucudnn.convolution.geometry import Interval, Window, intersect, length

MOST_EDGE = 1 / 8  # The largest share of a rank's outputs that is worth computing twice.


@dataclass(frozen=True)
class Edge:
    """Some outputs and what they read. Positions count from the start of the rank's own interval.

    The products of ``outputs`` read ``before`` positions outside the rank's own inputs, then ``rows`` of these, then
    ``after`` positions outside: a halo forward, where they are made anew, and zeros backward, where they are a halo.
    """

    outputs: Interval
    rows: Interval
    before: int
    after: int


@dataclass(frozen=True)
class Edges:
    """The edges of one rank: those at its start and at its end, or None where no halo is received."""

    padding: int  # With which the rank's own inputs alone give as many outputs as it owns.
    forward: tuple[Edge | None, Edge | None]
    backward: tuple[Edge | None, Edge | None]


def edges(
    kernel: Window,
    owned: tuple[Sequence[Interval], Sequence[Interval]],
    needs: tuple[Sequence[Interval], Sequence[Interval]],
) -> tuple[Edges, ...] | None:
    """The edges of all ranks along an axis; None unless dividing the work this way suits every one of them.

    Args:
        owned: the inputs and the outputs of each rank.
        needs: the inputs that its outputs read and the outputs that read its inputs, without those beyond the ends.
    """
    found = []
    for inputs, outputs, read, readers in zip(*owned, *needs, strict=True):
        one = _edges(kernel, inputs, outputs, read, readers)
        if one is None:
            return None
        found.append(one)
    return tuple(found)


def around(own: Interval, need: Interval) -> Need:
    """The owned elements, between the others that are needed."""
    before = intersect(need, (0, own[0]))
    after = intersect(need, (own[1], max(own[1], need[1])))
    return tuple(Piece(length(each), each[0]) for each in (before, own, after) if length(each))


def _edges(kernel: Window, inputs: Interval, outputs: Interval, read: Interval, readers: Interval) -> Edges | None:
    if not length(inputs) or not length(outputs):
        return None
    window = kernel.inputs(outputs)
    padding = inputs[0] - window[0]
    # A CPU's kernels for dL/dweight take up to three times as long where the padding exceeds the layer's own.
    if not 0 <= padding <= kernel.padding:
        return None
    alone = Window(kernel.kernel, kernel.stride, padding, kernel.dilation)
    if alone.outputs(length(inputs)) != length(outputs):
        return None
    first, last = outputs
    if read[0] < inputs[0]:
        first += -(-padding // kernel.stride)
    if read[1] > inputs[1]:
        last = max(outputs[0], outputs[0] + (inputs[1] - kernel.reach - window[0]) // kernel.stride + 1)
    if first > last or (length(outputs) - (last - first)) > MOST_EDGE * length(outputs):
        return None
    forward = _edge(kernel, inputs, outputs, (outputs[0], first)), _edge(kernel, inputs, outputs, (last, outputs[1]))
    backward = (
        _edge(kernel, inputs, outputs, intersect(readers, (0, outputs[0]))),
        _edge(kernel, inputs, outputs, intersect(readers, (outputs[1], max(outputs[1], readers[1])))),
    )
    halos = (inputs[0] - read[0], 0), (0, read[1] - inputs[1])
    if any(edge is not None and (edge.before, edge.after) != halo for edge, halo in zip(forward, halos, strict=True)):
        return None  # zeros beside a halo
    if any(edge is not None and not length(edge.rows) for edge in (*forward, *backward)):
        return None  # nothing of what the rank owns is read beside a halo
    return Edges(padding, forward, backward)


def _edge(kernel: Window, inputs: Interval, outputs: Interval, some: Interval) -> Edge | None:
    if not length(some):
        return None
    (start, stop), (first, last) = kernel.inputs(some), inputs
    rows = max(start, first) - first, min(stop, last) - first
    return Edge((some[0] - outputs[0], some[1] - outputs[0]), rows, max(0, first - start), max(0, stop - last))
