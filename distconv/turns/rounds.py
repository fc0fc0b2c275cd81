"""A round is one collective among parts, from the first member that joins it to the last.

Parts of one process copy their tensors in memory. Members that are parts of other ranks send and get theirs by mail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from distconv.turns import collectives
from distconv.turns.collectives import CollectiveArguments

Collective = Callable[[Sequence[CollectiveArguments], Sequence[int]], None]


class FarMembers(NamedTuple):
    """The members of a group that are parts of other ranks."""

    ranks: Mapping[int, int]  # The rank of each of these members.
    send: Callable[[int, int, int, Sequence[Tensor]], None]
    """Sends tensors. Args: the receiving rank; the sending member; the receiving one, or -1 for all of that rank."""
    are_imagined: bool = False  # These members send nothing: only the shapes of their tensors are followed.


NO_FAR_MEMBERS = FarMembers({}, lambda rank, at, to, tensors: None)


class Round(Protocol):
    """One collective of a group, called ``name``. Members are numbered by their ranks in the group."""

    name: str

    def join(self, at: int, given: CollectiveArguments) -> int:
        """Member ``at`` joins. Returns the bytes that members receive from others now."""

    def receive(self, at: int, to: int, tensors: Sequence[Tensor]) -> None:
        """Takes tensors that member ``at`` of another rank sends to member ``to`` here, or to all."""

    def may_go_on(self, at: int) -> bool:
        """Whether a member that has joined has all that it needs."""

    def leave(self, at: int) -> int:
        """A member goes on, and may change its tensors. Returns the bytes that members receive now."""

    def is_complete(self) -> bool:
        """Whether all members have joined, and all tensors of other ranks have arrived."""


class CommonRound:
    """A collective that is done at once for all members here, when all members have joined."""

    def __init__(self, collective: Collective, size: int, far_members: FarMembers = NO_FAR_MEMBERS) -> None:
        self.name = collective.__name__
        self._collective, self._far_members = collective, far_members
        self._here = [at for at in range(size) if at not in far_members.ranks]
        self._given: dict[int, CollectiveArguments] = {}
        self._far_tensors: dict[int, Sequence[Tensor]] = {}
        self._is_done = False

    def join(self, at: int, given: CollectiveArguments) -> int:
        self._given[at] = given
        if len(self._given) < len(self._here):
            return 0
        for rank in sorted(set(self._far_members.ranks.values())):
            for member in self._here:
                self._far_members.send(rank, member, -1, self._given[member].inputs)
        if self._far_members.are_imagined:
            self._far_tensors = dict.fromkeys(self._far_members.ranks, given.inputs)
        return self._do() if self.is_complete() else 0

    def receive(self, at: int, to: int, tensors: Sequence[Tensor]) -> None:
        self._far_tensors[at] = tensors

    def may_go_on(self, at: int) -> bool:
        return self.is_complete()

    def leave(self, at: int) -> int:
        return 0 if self._is_done else self._do()

    def is_complete(self) -> bool:
        have_come = len(self._given) == len(self._here) and len(self._far_tensors) == len(self._far_members.ranks)
        return self._is_done or have_come

    def _do(self) -> int:
        """Runs in the thread of a member here, which pages the parts' tensors."""
        options = self._given[self._here[0]].numbers
        far = {at: CollectiveArguments(tensors, (), options) for at, tensors in self._far_tensors.items()}
        self._collective([each for _, each in sorted({**self._given, **far}.items())], self._here)
        moved = sum(map(collectives.received, self._given.values()))
        self._is_done = True
        self._given, self._far_tensors = {}, {}
        return moved


class RowsRound:
    """An all-to-all of rows, in which a member goes on as soon as it has all rows that it is to receive.

    So a part goes on when its neighbours have sent the rows beyond its edges, and only a few parts at a time have
    tensors that they computed since all of them last waited for each other.

    A member's numbers are two lists: how many rows of its input go to each member, and how many rows of its output come
    from each.
    """

    name = "all_to_all_single"

    def __init__(self, size: int, far_members: FarMembers = NO_FAR_MEMBERS) -> None:
        self._far_members = far_members
        self._missing = size - len(far_members.ranks)
        self._sent: dict[int, dict[int, Tensor]] = {}
        """By member that has joined, then by receiver: rows that have not been copied yet."""
        self._lacking: dict[int, dict[int, Tensor]] = {}
        """By member that has joined, then by sender: views of its output whose rows have not come yet."""
        self._arrived: dict[int, dict[int, Tensor]] = {}
        """By member here, then by sender of another rank: rows that have come, but are not in the output yet."""
        self._left: set[int] = set()  # The members that have gone on.

    def join(self, at: int, given: CollectiveArguments) -> int:
        sent, received = given.numbers
        rows = _rows(given.inputs[0], sent)
        for to in [to for to in rows if to in self._far_members.ranks]:
            self._far_members.send(self._far_members.ranks[to], at, to, [rows.pop(to)])
        self._sent[at], self._lacking[at] = rows, _rows(given.outputs[0], received)
        self._missing -= 1
        if self._far_members.are_imagined:
            self._arrived[at] = {of: x for of, x in self._lacking[at].items() if of in self._far_members.ranks}
        for source, arrived in self._arrived.get(at, {}).items():
            _agree(at, self._lacking[at].get(source), arrived)
        self._give(at, at)
        return sum(self._give(at, other) + self._give(other, at) for other in self._sent if other != at)

    def receive(self, at: int, to: int, tensors: Sequence[Tensor]) -> None:
        (rows,) = tensors
        if to in self._lacking:
            _agree(to, self._lacking[to].get(at), rows)
        self._arrived.setdefault(to, {})[at] = rows

    def may_go_on(self, at: int) -> bool:
        return self._lacking[at].keys() <= self._arrived.get(at, {}).keys()

    def leave(self, at: int) -> int:
        lacking, arrived = self._lacking[at], self._arrived.pop(at, {})
        for source, rows in arrived.items():
            lacking.pop(source).copy_(rows)
        if at not in self._left:
            self._left.add(at)
            self._sent[at] = {to: rows.clone() for to, rows in self._sent[at].items()}
        return sum(rows.nbytes for rows in arrived.values())

    def is_complete(self) -> bool:
        return not self._missing and all(map(self.may_go_on, self._lacking))

    def _give(self, source: int, to: int) -> int:
        """Copies the rows that one member that has joined sends to another; returns their bytes."""
        rows, place = self._sent[source].pop(to, None), self._lacking[to].pop(source, None)
        _agree(to, place, rows)
        if rows is None or place is None:
            return 0
        place.copy_(rows)
        return rows.nbytes


def _agree(to: int, place: Tensor | None, rows: Tensor | None) -> None:
    """ValueError where a member has room for another number of rows than it gets."""
    expected, got = (0 if x is None else x.shape[0] for x in (place, rows))
    if expected != got:
        raise ValueError(f"all_to_all_single: member {to} expects {expected} rows, and gets {got}")


def _rows(x: Tensor, counts: Sequence[int]) -> dict[int, Tensor]:
    """The rows of each member that has any."""
    return {at: rows for at, rows in enumerate(x.split(list(counts))) if rows.shape[0]}
