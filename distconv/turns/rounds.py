"""A round is one collective, from the first member that joins it to the last.

Some members may be parts of other ranks. Their tensors arrive by mail, and those of members here are sent to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from distconv.turns import collectives
from distconv.turns.collectives import CollectiveArguments

Collective = Callable[[Sequence[CollectiveArguments], Sequence[int]], None]


class Elsewhere(NamedTuple):
    """The members of a group that are parts of other ranks."""

    ranks: Mapping[int, int]  # Theirs, by member.
    send: Callable[[int, int, int, Sequence[Tensor]], None]
    """Takes the rank that is to get some tensors, the member that sends them, and the one that they are for, -1 for
    all of that rank."""
    are_imagined: bool = False  # These members send nothing: only the shapes of their tensors are followed.


HERE_ALONE = Elsewhere({}, lambda rank, at, to, tensors: None)


class Round(Protocol):
    """One collective of a group. ``name``: of the collective."""

    name: str

    def join(self, at: int, given: CollectiveArguments) -> int:
        """A member joins. Returns the bytes that members have received from others by that."""

    def receive(self, at: int, to: int, tensors: Sequence[Tensor]) -> None:
        """Takes tensors of a member elsewhere for one here, or for all."""

    def serves(self, at: int) -> bool:
        """Whether a member that has joined may go on."""

    def leave(self, at: int) -> int:
        """A member goes on, and may change its tensors. Returns the bytes that members have received by that."""

    def is_complete(self) -> bool:
        """Whether nobody is to join or to send any more."""


class CommonRound:
    """A collective that is done at once for all members here, when all members have joined."""

    def __init__(self, collective: Collective, size: int, elsewhere: Elsewhere = HERE_ALONE) -> None:
        self.name = collective.__name__
        self._collective, self._elsewhere = collective, elsewhere
        self._here = [at for at in range(size) if at not in elsewhere.ranks]
        self._given: dict[int, CollectiveArguments] = {}
        self._far: dict[int, Sequence[Tensor]] = {}
        self._is_done = False

    def join(self, at: int, given: CollectiveArguments) -> int:
        self._given[at] = given
        if len(self._given) < len(self._here):
            return 0
        for rank in sorted(set(self._elsewhere.ranks.values())):
            for member in self._here:
                self._elsewhere.send(rank, member, -1, self._given[member].inputs)
        if self._elsewhere.are_imagined:
            self._far = dict.fromkeys(self._elsewhere.ranks, given.inputs)
        return self._do() if self.is_complete() else 0

    def receive(self, at: int, to: int, tensors: Sequence[Tensor]) -> None:
        self._far[at] = tensors

    def serves(self, at: int) -> bool:
        return self.is_complete()

    def leave(self, at: int) -> int:
        return 0 if self._is_done else self._do()

    def is_complete(self) -> bool:
        return self._is_done or (len(self._given) == len(self._here) and len(self._far) == len(self._elsewhere.ranks))

    def _do(self) -> int:
        """Runs in the thread of a member here, which pages the parts' tensors."""
        options = self._given[self._here[0]].numbers
        far = {at: CollectiveArguments(tensors, (), options) for at, tensors in self._far.items()}
        self._collective([each for _, each in sorted({**self._given, **far}.items())], self._here)
        moved = sum(map(collectives.received, self._given.values()))
        self._is_done = True
        self._given, self._far = {}, {}
        return moved


class RowsRound:
    """An all-to-all of rows, in which a member goes on as soon as it has what it gets.

    So a part goes on when its neighbours have sent the rows beyond its edges, and only a few parts at a time have
    tensors that they computed since all of them last waited for each other.

    A member gives an input, an output, and how many rows of them go to every member, and how many it gets from each.
    """

    name = "all_to_all_single"

    def __init__(self, size: int, elsewhere: Elsewhere = HERE_ALONE) -> None:
        self._elsewhere = elsewhere
        self._missing = size - len(elsewhere.ranks)
        self._sent: dict[int, dict[int, Tensor]] = {}
        """By member that has joined, then by the one that gets them: rows that have not been given out."""
        self._lacking: dict[int, dict[int, Tensor]] = {}
        """By member that has joined, then by the one that sends them: where rows belong that are not there."""
        self._arrived: dict[int, dict[int, Tensor]] = {}
        """By member here, then by the one elsewhere that has sent them: rows that are not in their place."""
        self._left: set[int] = set()

    def join(self, at: int, given: CollectiveArguments) -> int:
        sent, received = given.numbers
        rows = _rows(given.inputs[0], sent)
        for to in [to for to in rows if to in self._elsewhere.ranks]:
            self._elsewhere.send(self._elsewhere.ranks[to], at, to, [rows.pop(to)])
        self._sent[at], self._lacking[at] = rows, _rows(given.outputs[0], received)
        self._missing -= 1
        if self._elsewhere.are_imagined:
            self._arrived[at] = {of: x for of, x in self._lacking[at].items() if of in self._elsewhere.ranks}
        for source, arrived in self._arrived.get(at, {}).items():
            _agree(at, self._lacking[at].get(source), arrived)
        self._give(at, at)
        return sum(self._give(at, other) + self._give(other, at) for other in self._sent if other != at)

    def receive(self, at: int, to: int, tensors: Sequence[Tensor]) -> None:
        (rows,) = tensors
        if to in self._lacking:
            _agree(to, self._lacking[to].get(at), rows)
        self._arrived.setdefault(to, {})[at] = rows

    def serves(self, at: int) -> bool:
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
        return not self._missing and all(map(self.serves, self._lacking))

    def _give(self, source: int, to: int) -> int:
        """The bytes that one member that has joined gives to another."""
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
