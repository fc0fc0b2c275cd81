"""Asks all ranks of a job where they are, through the job's key-value store.

A thread of each rank answers, even while the rank computes or waits. Nothing is collective.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping

from torch.distributed import Store  # type: ignore[attr-defined]

from distconv.agreement.disagreement import named
from distconv.job.attempt import prefix, without_prefix
from distconv.job.standstill import RankState, Waiting, standstill


class Questions:
    """The questions that have been asked in a job.

    Attributes:
        answered: how many of them this rank has answered.
    """

    def __init__(self, store: Store, size: int) -> None:
        self.store, self._size, self.answered = without_prefix(store), size, 0
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
