"""The memory of a call over time, by the shapes of its tensors: what each operator finds alive.

One tick is one operator that makes or changes something. A segment is a call of a module, or of some children in a row
of an `nn.Sequential`; what it keeps for its own backward is what could be computed again, or moved away meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Segment(NamedTuple):
    """A call of a module, or of some children in a row of an `nn.Sequential`, within one call of a model."""

    module: str  # Its name in the model.
    call: int  # The how manyth call of it, from 0.
    children: tuple[int, int] | None = None  # The first child and the one after the last; None: the whole module.


@dataclass
class Storage:
    """A storage. Ticks are those during which it is alive.

    Attributes:
        size: bytes.
        born: the tick that made it; -1: before the call.
        died: the last tick before the program let it go, if it did; autograd may keep it longer.
        written, saved: the last ticks in forward that changed it, and that let autograd keep it for backward.
        save: the number of that keeping, among those of all storages.
        used, freed: the first and the last tick in backward for which autograd kept it.
    """

    size: int
    born: int
    died: int | None = None
    written: int = -1
    saved: int | None = None
    save: int = 0
    used: int | None = None
    freed: int | None = None

    @property
    def end(self) -> int | None:
        """The last tick of its life; None where it outlives the call."""
        if self.died is None or (self.saved is not None and self.freed is None):
            return None
        return max(self.died, self.freed or -1)


@dataclass
class Extent:
    """What a segment's forward covers.

    Attributes:
        first, end: its ticks in forward.
        saves: the numbers of the first keeping by autograd since its begin, and of the first one after it.
        given, made: the storages of its inputs and of its results.
        again: whether its forward can be computed twice with one result: it changes no input, parameter, attribute
            or random number that torch does not put back.
        buffers: the names in the model of the buffers that it changes.
    """

    segment: Segment
    first: int
    end: int
    saves: tuple[int, int]
    given: frozenset[int]
    made: frozenset[int]
    again: bool
    buffers: tuple[str, ...] = ()


@dataclass
class Timeline:
    """A call, followed by its shapes, with the backward of the sum of its results where autograd records it.

    Attributes:
        seconds: of each tick, by round prices.
        scratch: bytes that its kernel takes by itself.
        place: of each tick, the one in forward that it belongs to: itself, or in backward that which it differentiates.
        storages: by number; those of parameters, buffers and inputs are alive before the first tick.
        forward: the number of ticks of forward.
        whole, results: bytes of parameters, buffers and inputs, and of what the call gives.
        operations: of convolutions and products of matrices.
        largest: the most bytes that an operator needs and makes, parameters, inputs and their gradients left out.
    """

    seconds: list[float] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)
    extents: list[Extent] = field(default_factory=list)
    forward: int = 0
    whole: int = 0
    results: int = 0
    operations: int = 0
    largest: int = 0

    def alive(self) -> list[int]:
        """Bytes at each tick, with the scratch of its kernel."""
        change = [0] * (len(self.seconds) + 1)
        for storage in self.storages.values():
            change[max(storage.born, 0)] += storage.size
            end = storage.end
            if end is not None and end + 1 < len(change):
                change[max(end, -1) + 1] -= storage.size
        now, found = 0, []
        for tick, scratch in enumerate(self.scratch):
            now += change[tick]
            found.append(now + scratch)
        return found
