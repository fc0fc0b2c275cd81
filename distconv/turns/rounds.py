"""Rounds: a collective each, from the first member that comes to it to the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from distconv.turns import collectives
from distconv.turns.collectives import Given

Collective = Callable[[Sequence[Given]], None]


class Round(Protocol):
    """One collective of a group. ``name``: of the collective; ``missing``: how many members have not come."""

    name: str
    missing: int

    def bring(self, at: int, given: Given) -> int:
        """A member has come. Returns the bytes that members have got from others by that."""

    def serves(self, at: int) -> bool:
        """Whether a member that has come may go on."""

    def leave(self, at: int) -> None:
        """A member goes on, and may change what it has brought."""


class CommonRound:
    """A collective that the last member that comes does for all."""

    def __init__(self, collective: Collective, size: int) -> None:
        self.name, self.missing = collective.__name__, size
        self._collective = collective
        self._given: list[Any] = [None] * size

    def bring(self, at: int, given: Given) -> int:
        self._given[at] = given
        self.missing -= 1
        if self.missing:
            return 0
        members, self._given = self._given, []
        self._collective(members)
        return sum(map(collectives.received, members))

    def serves(self, at: int) -> bool:
        return not self.missing

    def leave(self, at: int) -> None:
        pass


class RowsRound:
    """An all-to-all of rows, in which a member goes on as soon as it has what it gets.

    So a part goes on when its neighbours have brought the rows beyond its edges, and only a few parts at a time hold
    what they have computed since all of them last waited for each other.

    A member brings an input, an output, and how many rows of them go to every member, and come from it.
    """

    name = "all_to_all_single"

    def __init__(self, size: int) -> None:
        self.missing = size
        self._sent: dict[int, dict[int, Tensor]] = {}
        """By member that has come, then by the one that gets them: rows that have not been given out."""
        self._lacking: dict[int, dict[int, Tensor]] = {}
        """By member that has come, then by the one that sends them: where rows belong that are not there."""
        self._left: set[int] = set()

    def bring(self, at: int, given: Given) -> int:
        sent, received = given.numbers
        self._sent[at], self._lacking[at] = _rows(given.inputs[0], sent), _rows(given.outputs[0], received)
        self.missing -= 1
        self._give(at, at)
        return sum(self._give(at, other) + self._give(other, at) for other in self._sent if other != at)

    def serves(self, at: int) -> bool:
        return not self._lacking[at]

    def leave(self, at: int) -> None:
        if at not in self._left:
            self._left.add(at)
            self._sent[at] = {to: rows.clone() for to, rows in self._sent[at].items()}

    def _give(self, source: int, to: int) -> int:
        """The bytes that one member that has come gives to another."""
        rows, place = self._sent[source].pop(to, None), self._lacking[to].pop(source, None)
        counts = [0 if x is None else x.shape[0] for x in (rows, place)]
        if counts[0] != counts[1]:
            raise ValueError(f"all_to_all_single: member {to} expects {counts[1]} rows, and gets {counts[0]}")
        if rows is None or place is None:
            return 0
        place.copy_(rows)
        return rows.nbytes


def _rows(x: Tensor, counts: Sequence[int]) -> dict[int, Tensor]:
    """The rows of each member that has any."""
    return {at: rows for at, rows in enumerate(x.split(list(counts))) if rows.shape[0]}
