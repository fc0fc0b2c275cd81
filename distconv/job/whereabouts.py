"""Asks all ranks of a job where they are, through the job's key-value store, and names the collective that delays it.

A thread of each rank answers, even while the rank computes or waits. Nothing is collective.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from distconv.agreement.disagreement import named
from distconv.job.attempt import prefix, without_prefix


@dataclass(frozen=True)
class Waiting:
    """A collective that a rank has begun and that is not complete."""

    name: str  # The name of the function that began it.
    group: str  # The name of its group.
    number: int  # Among the collectives of the group, counted from 1.
    ranks: tuple[int, ...]  # The ranks of the group.
    seconds: float  # Since it began.


@dataclass(frozen=True)
class RankState:
    """The position of a rank in its program."""

    counts: Mapping[str, int]  # How many collectives of each group it has begun.
    waiting: Waiting | None  # The one that it waits in; None where there is none.
    line: str  # The line of the program, such as "train.py:31"; "" if none is known.


def standstill(states: Mapping[int, RankState]) -> tuple[Waiting, str] | None:
    """The collective in which ranks wait, and what to report of it; None if no rank waits.

    ``states``: of the ranks that have answered, by rank.
    """
    found = [(rank, state.waiting) for rank, state in sorted(states.items()) if state.waiting is not None]
    waiting = dict(sorted(found, key=lambda each: -each[1].seconds))
    chains = []
    for rank, at in waiting.items():
        begun = {r for r, state in states.items() if state.counts.get(at.group, 0) >= at.number}
        missing = [other for other in at.ranks if other not in begun]
        # Ranks that have waited about as long are delayed, too; one that has just begun to wait may still go on.
        late = [other for other in missing if other not in waiting or waiting[other].seconds < at.seconds / 2]
        if late:
            return at, f"{_waiting(at, states[rank])} for {_each(late, states)}"
        if missing:
            chains.append((rank, at, missing))
    if chains:
        chain = "; ".join(
            f"{named([rank])} in {at.name} among {named(at.ranks)}{_at(states[rank])} for {named(missing)}"
            for rank, at, missing in chains
        )
        return chains[0][1], f"ranks wait for one another: {chain}"
    for rank, at in waiting.items():
        place = at.group, at.number
        others = {other: theirs for other, theirs in waiting.items() if (theirs.group, theirs.number) == place}
        if len({theirs.name for theirs in others.values()}) > 1:
            places = ", ".join(f"{named([r])} in {theirs.name}{_at(states[r])}" for r, theirs in others.items())
            return at, f"ranks of one group are in different collectives: {places}"
        return at, f"{_waiting(at, states[rank])}, though all its ranks are there"
    return None


def _waiting(at: Waiting, state: RankState) -> str:
    return f"{at.name} among {named(at.ranks)}{_at(state)} has waited {at.seconds:.0f} s"


def _at(state: RankState) -> str:
    return f" at {state.line}" if state.line else ""


def _each(ranks: Sequence[int], states: Mapping[int, RankState]) -> str:
    """Ranks with the places where they are."""
    by_place: dict[str, list[int]] = {}
    for rank in ranks:
        state = states.get(rank)
        place = "not answering" if state is None else f"at {state.line}" if state.line else ""
        by_place.setdefault(place, []).append(rank)
    return "; ".join(f"{named(some)}, {place}" if place else named(some) for place, some in by_place.items())


class Questions:
    """The questions that have been asked in a job."""

    def __init__(self, store: Store, size: int) -> None:
        self.store, self._size = without_prefix(store), size
        self.answered = 0  # How many of them this rank has answered.
        self.at = prefix("slow")

    def is_open(self) -> bool:
        """Whether a question has been asked that this rank has not answered."""
        return bool(self.store.check([f"{self.at}/{self.answered}/asked"]))

    def answer(self, rank: int, state: RankState) -> None:
        """Reports where this rank is."""
        self.store.set(f"{self.at}/{self.answered}/{rank}", json.dumps(dataclasses.asdict(state)))
        self.answered += 1

    def ask(self) -> int:
        """Asks all ranks; the number of the question."""
        question = int(self.store.add(f"{self.at}/questions", 1)) - 1
        self.store.set(f"{self.at}/{question}/asked", "")
        return question

    def answers(self, question: int) -> dict[int, RankState]:
        """The answers of ranks so far."""
        keys = {rank: f"{self.at}/{question}/{rank}" for rank in range(self._size)}
        return {rank: _read(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}

    def asked_now(self, seconds: float) -> list[str]:
        """The places of all ranks, a line each, by their answers within so many seconds."""
        question, deadline = self.ask(), time.monotonic() + seconds
        while len(states := self.answers(question)) < self._size and time.monotonic() < deadline:
            time.sleep(0.05)
        return sentences_about(states, self._size)


def sentences_about(states: Mapping[int, RankState], size: int) -> list[str]:
    """A line for each rank, and one about what the ranks wait for, if they do."""
    lines = [f"rank {rank} of {size}: {_where(states.get(rank))}" for rank in range(size)]
    found = standstill(states)
    return lines if found is None else [*lines, found[1]]


def _where(state: RankState | None) -> str:
    if state is None:
        return "does not answer: it is starting or ending, or its Python is blocked"
    place = f"at {state.line}" if state.line else "at no line of the script"
    if state.waiting is None:
        return f"{place}, in no collective"
    at = state.waiting
    return f"{place}, for {at.seconds:.0f} s in {at.name} among {named(at.ranks)}"


def _read(text: bytes) -> RankState:
    answer = json.loads(text)
    waiting = answer["waiting"]
    if waiting is not None:
        waiting = Waiting(**{**waiting, "ranks": tuple(waiting["ranks"])})
    return RankState(answer["counts"], waiting, answer["line"])
