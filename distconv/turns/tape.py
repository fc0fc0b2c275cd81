"""A tape: what one part of a call does to memory, in order, to predict from it the memory of many such parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from distconv.turns.work import Work

LEAST, USUAL = 1 << 14, 1 << 16
"""Bytes of the smallest storages that leave the device, and are counted, within a small limit and within others. Small
ones take as much time as large ones."""

SMALL = 1 << 23  # Such a limit.


def least_within(limit: float) -> int:
    """The bytes of the smallest storages that leave the device within a limit of the parts' tensors."""
    return LEAST if limit < SMALL else USUAL


def is_copied(size: int, users: int, limit: float) -> bool:
    """Whether an operator that can compute in a copy of a storage does so: both together exceed the limit."""
    return 2 * size > limit and not users


class Begun(NamedTuple):
    """An operator is to read some storages of the part, and may change them: they are on the device until `Ended`.

    ``copied``: one of these that need not be there, as the operator can compute in a copy of it (`in_place.py`).
    """

    storages: tuple[int, ...]
    changes: bool
    copied: int | None = None


class Ran(NamedTuple):
    """An operator has made storages, each with its number and bytes; its kernel takes ``scratch`` bytes besides."""

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
        number: counts the collectives of the part.
        name: of the collective.
        axes: the mesh axes of its group.
        inputs, outputs: the storages.
        sent: of an all-to-all of rows, (distance to another member in the group, bytes sent to it).
        received: the distances to the members whose rows it needs before it goes on; None: it waits for all.
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
    """Events of the first part alone that comes to them, for all parts of the process."""

    number: int
    events: list[Event]


class PagedOperator(NamedTuple):
    """An operator: `Begun`, `Ran` and `Ended` in one. ``paged``: what may leave from now on."""

    storages: tuple[int, ...]
    changes: bool
    made: tuple[tuple[int, int], ...]
    scratch: int
    paged: tuple[int, ...]
    copied: int | None = None


class ByteChange(NamedTuple):
    """Operators on storages that stay until they are freed: bytes on the device beyond those before, at the end, at
    most, and at most with kernels' scratch memory."""

    change: int
    most: int
    with_scratch: int


class Eviction(NamedTuple):
    """An operator has ended that neither read nor made what may leave: what is too much on the device leaves it."""


Event: TypeAlias = (
    Begun | Ran | Ended | Freed | Released | Joined | Waited | Once | PagedOperator | ByteChange | Eviction
)


class Section(NamedTuple):
    """Successive events, of each part or of the caller."""

    of_parts: bool
    events: list[Event]


@dataclass
class Tape:
    """A call of which one part was followed, as a member of a mesh whose other members are imagined.

    Attributes:
        sizes: of the mesh, by axis.
        parts: along each axis, how many of these the process computes itself; they are the first ones.
        forward: the number of sections of forward.
        bytes: of each storage that was made.
        common: the storages that all parts of a process share.
        whole, results: bytes of parameters, buffers and inputs, and of the results of the call.
        copied: bytes of state of which each part but the first has a copy.
        exchanged: bytes that the part receives from others.
        work, work_once: of the operators of the part, and of those that run once for all parts.
    """

    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    sections: list[Section] = field(default_factory=list)
    forward: int = 0
    bytes: dict[int, int] = field(default_factory=dict)
    common: set[int] = field(default_factory=set)
    whole: int = 0
    results: int = 0
    copied: int = 0
    exchanged: int = 0
    work: Work = field(default_factory=Work)
    work_once: Work = field(default_factory=Work)
