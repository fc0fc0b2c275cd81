"""A model's call over time, forward and backward: which storages are alive at each of its operators.

A call is followed by the shapes of its tensors, without numbers (`distconv.fitting.following`). A *tick* is an operator
that makes or changes a storage; ticks are numbered from 0, those of backward behind those of forward. A *segment* is a
call of one module, or of neighbouring children of an `nn.Sequential`: what autograd keeps of it for backward could be
computed again there, or moved off the device until then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Segment(NamedTuple):
    """A call of a module, or of neighbouring children of an `nn.Sequential`, within one call of a model."""

    module: str  # The name of the module in the model.
    call: int  # Counts the calls of this module within that of the model, from 0.
    children: tuple[int, int] | None = None  # The first child and the one after the last; None: the whole module.


@dataclass
class Storage:
    """The life of a storage, in ticks.

    Attributes:
        size: bytes.
        made: the tick that made it; -1: before the call.
        released: the last tick at which the program referred to it, None if it still does; autograd may keep it longer.
        written: the last tick in forward that changed it.
        saved: the tick in forward at which autograd last saved it for backward.
        save_number: the number of that save, among all saves of the call.
        first_used, freed: the first and the last tick in backward for which autograd kept it.
    """

    size: int
    made: int
    released: int | None = None
    written: int = -1
    saved: int | None = None
    save_number: int = 0
    first_used: int | None = None
    freed: int | None = None

    @property
    def end(self) -> int | None:
        """The last tick of its life; None where it outlives the call."""
        if self.released is None or (self.saved is not None and self.freed is None):
            return None
        return max(self.released, self.freed or -1)


@dataclass
class SegmentRecord:
    """The record of a segment's forward.

    Attributes:
        first, end: its ticks in forward are those from ``first`` to ``end - 1``.
        saves: the number of its first save for backward, and of the first one after it.
        inputs, results: the numbers of their storages.
        repeatable: whether its forward can be computed twice with one result: it changes no input, parameter, attribute
            or random number that torch does not put back.
        buffers: the names in the model of the buffers that it changes.
        read: the numbers of the storages of its parameters.
    """

    segment: Segment
    first: int
    end: int
    saves: tuple[int, int]
    inputs: frozenset[int]
    results: frozenset[int]
    repeatable: bool
    buffers: tuple[str, ...] = ()
    read: frozenset[int] = frozenset()


@dataclass
class Timeline:
    """A call, with the backward of the sum of its results where autograd records it.

    Attributes:
        seconds: of each tick, by round prices.
        scratch: by tick, the bytes that its kernel allocates for itself.
        forward_tick: by tick, the one in forward to which it belongs: itself, or in backward the one that it
            differentiates.
        storages: by number; those of parameters, buffers and inputs are alive before the first tick.
        segments: in the order in which they end.
        convolutions: the ticks of those, each with its `mucudnn.convolution.call.Call.kind`.
        gathered: by number, the bytes of whole parameters that a rank has only while it uses them.
        forward: the number of ticks of forward.
        initial, results: bytes of parameters, buffers and inputs, and of the call's results.
        operations: of convolutions and products of matrices.
        later: bytes that calls of the script between forward and backward need.
        largest: the most bytes that one operator reads and makes, but for parameters, inputs and their gradients.
    """

    seconds: list[float] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    forward_tick: list[int] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)
    segments: list[SegmentRecord] = field(default_factory=list)
    convolutions: list[tuple[int, Any]] = field(default_factory=list)
    gathered: dict[int, int] = field(default_factory=dict)
    forward: int = 0
    initial: int = 0
    results: int = 0
    operations: int = 0
    largest: int = 0
    later: int = 0

    @property
    def kept(self) -> int:
        """Bytes between forward and backward, besides those of before the call and of its results."""
        made = (x for x in self.storages.values() if 0 <= x.made < self.forward)
        return max(sum(x.size for x in made if x.end is None or x.end >= self.forward) - self.results, 0)

    @property
    def between(self) -> int:
        """All bytes between forward and backward, with those that calls in between need."""
        return self.initial + self.results + self.kept + self.later

    def repeated(self) -> tuple[str, ...] | None:
        """The names of the buffers that the whole call changes; None where it cannot be computed twice."""
        found = next((record for record in self.segments if record.segment == Segment("", 0)), None)
        return found.buffers if found is not None and found.repeatable else None

    def alive(self) -> list[int]:
        """Bytes at each tick, with the scratch of its kernel."""
        change = [0] * (len(self.seconds) + 1)
        for storage in self.storages.values():
            change[max(storage.made, 0)] += storage.size
            end = storage.end
            if end is not None and end + 1 < len(change):
                change[max(end, -1) + 1] -= storage.size
        now, found = 0, []
        for tick, scratch in enumerate(self.scratch):
            now += change[tick]
            found.append(now + scratch)
        return found

    def alone(self) -> int:
        """The most bytes at any tick."""
        return max([*self.alive(), self.initial])

    def peak(self) -> int:
        """The most bytes at any tick, and where later calls need some, between forward and backward."""
        return max(self.alone(), self.between if self.later else 0)
