"""Prints, after a while, one line about the collective that delays the job and the ranks that it waits for.

A rank that has waited long in a collective asks all ranks where they are, through the job's key-value store. A thread
of each rank answers, even while the rank computes. Nothing here is collective, and nothing ends the job: an operation
may be slow on purpose, such as a checkpoint that one rank writes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distconv import settings
from distconv.job.collectives import Collectives, noted
from distconv.job.standstill import RankState, Waiting, standstill
from distconv.job.whereabouts import Questions
from distconv.tensors.user_lines import script_line

LOOK_SECONDS = 1.0  # Between two looks at the store, at most; a quarter of what a rank may wait where that is less.

LONGEST = 10
"""Every line doubles the time that a rank may wait, up to this multiple of the setting, so that a pause of every epoch
is reported once."""


@contextlib.contextmanager
def reporting_what_is_slow(store: Store, report: Callable[[str], None]) -> Iterator[None]:
    """A context in which `report` gets a line if a rank waits in a collective for longer than the setting `slow_after`.

    Every rank of the job must call it before it makes process groups.
    """
    seconds = settings.value("slow_after")
    if dist.get_world_size() == 1:
        yield
        return
    with noted() as collectives:
        watchdog = _Watchdog(store.clone(), collectives, seconds, report)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            watchdog.close()


class _Watchdog:
    def __init__(self, store: Store, collectives: Collectives, seconds: float, report: Callable[[str], None]) -> None:
        self._collectives, self._report = collectives, report
        self._questions = Questions(store, dist.get_world_size())
        self._rank = dist.get_rank()
        self._seconds, self._look = seconds, min(LOOK_SECONDS, seconds / 4)
        self._asked: tuple[str, int] | None = None
        self._program = threading.main_thread()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2 * self._look)  # it may be waiting for a store that is gone

    def _watch(self) -> None:
        with contextlib.suppress(dist.DistError):  # the store has gone: the job ends, which others report
            while not self._closed.wait(self._look):
                self._answer()
                self._ask()

    def _answer(self) -> None:
        """Reports where this rank is, where that has been asked."""
        while self._questions.is_open():
            self._questions.answer(self._rank, self._state())

    def _ask(self) -> None:
        """Asks where all ranks are, where this one has waited for long and no other asks about the same."""
        begun = self._collectives.waiting()
        allowed = self._seconds * min(2**self._questions.answered, LONGEST)
        if begun is None or time.monotonic() - begun.since < allowed or self._asked == (begun.group, begun.number):
            return
        self._asked = begun.group, begun.number
        if not self._is_first(f"asking/{begun.group}/{begun.number}"):
            return
        question = self._questions.ask()
        self._answer()
        if self._closed.wait(2 * self._look) or begun.is_complete():
            return
        found = standstill(self._questions.answers(question))
        if found is not None and self._is_first(f"reported/{found[0].group}/{found[0].number}"):
            self._report(found[1])

    def _is_first(self, what: str) -> bool:
        return bool(self._questions.store.add(f"{self._questions.at}/{what}", 1) == 1)

    def _state(self) -> RankState:
        begun = self._collectives.waiting()
        waiting = None
        if begun is not None:
            ranks = tuple(self._collectives.ranks[begun.group])
            waiting = Waiting(begun.name, begun.group, begun.number, ranks, time.monotonic() - begun.since)
        frame = sys._current_frames().get(self._program.ident or 0)
        return RankState(dict(self._collectives.counts), waiting, script_line(frame) if frame is not None else "")
