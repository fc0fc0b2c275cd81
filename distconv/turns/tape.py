"""What one part of a call does to memory, in order: all that it takes to foresee what many such parts take together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

LEAST = 1 << 16  # Bytes; smaller storages stay on the device, and are not counted.


class Begun(NamedTuple):
    """An operator is to read some storages of the part, and may change them: they are on the device until `Ended`."""

    storages: tuple[int, ...]
    changes: bool


class Ran(NamedTuple):
    """An operator has made storages of its own, by number and bytes; its kernel takes ``scratch`` bytes beside."""

    made: tuple[tuple[int, int], ...]
    scratch: int


class Ended(NamedTuple):
    """The operator that began last has ended. ``made``: storages that may leave the device from now on."""

    made: tuple[int, ...]


class Freed(NamedTuple):
    """Nothing refers to a storage any more."""

    storage: int


class Released(NamedTuple):
    """A storage is the caller's: it is on the device from now on."""

    storage: int


class Joined(NamedTuple):
    """The part joins a collective.

    Attributes:
        number: of the collective among those of the part.
        name: of the collective.
        axes: of the mesh, along which its group goes.
        inputs, outputs: the storages.
        sent: of an all-to-all of rows, the bytes to other members, by how far they are ahead in the group.
        received: how far those are ahead whose rows it needs before it goes on; None: it waits for all.
    """

    number: int
    name: str
    axes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sent: tuple[tuple[int, int], ...] = ()
    received: tuple[int, ...] | None = None


class Waited(NamedTuple):
    """The part goes on when the collective of a number is over for it."""

    number: int


class Once(NamedTuple):
    """What only the first part that reaches it does, for all parts of the process."""

    number: int
    events: list[Event]


Event: TypeAlias = Begun | Ran | Ended | Freed | Released | Joined | Waited | Once


class Section(NamedTuple):
    """Events in a row, of each part or of the caller."""

    of_parts: bool
    events: list[Event]


@dataclass
class Tape:
    """A call of which one part was followed, as a member of a mesh whose other members are imagined.

    Attributes:
        sizes: of the mesh, by axis.
        parts: of these, how many along each axis the process computes itself, the first ones.
        bytes: of each storage that was made.
        common: the storages that all parts of a process have together.
        whole, results: bytes of parameters, buffers and inputs, and of what the call gives.
        copied: bytes of state that each part but the first has a copy of.
        exchanged: bytes that the part gets from others.
        operations: of convolutions and products of matrices, by the part and once for all parts.
    """

    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    sections: list[Section] = field(default_factory=list)
    bytes: dict[int, int] = field(default_factory=dict)
    common: set[int] = field(default_factory=set)
    whole: int = 0
    results: int = 0
    copied: int = 0
    exchanged: int = 0
    operations: int = 0
    operations_once: int = 0
