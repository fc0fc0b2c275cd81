"""Prints, after a while, one line about the collective that delays the job and the ranks that it waits for.

A rank that has waited long in a collective asks all ranks where they are, through the job's key-value store. A thread
of each rank answers, even while the rank computes. Nothing here is collective, and nothing ends the job: an operation
may be slow on purpose, such as a checkpoint that one rank writes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]

from distconv import settings
from distconv.job.whereabouts import Questions, RankState, Waiting, standstill
from distconv.tensors.user_lines import script_line
from distconv.transfer import group_calls
from distconv.turns.world import thread
from mucudnn.process import substituted

LOOK_SECONDS = 1.0  # Between two looks at the store, at most; a quarter of what a rank may wait where that is less.

LONGEST = 10
"""Every line doubles the time that a rank may wait, up to this multiple: a pause of every epoch is reported once."""


@contextlib.contextmanager
def slow_collectives_reported(store: Store, report: Callable[[str], None]) -> Iterator[None]:
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


MOST_REMEMBERED = 256  # The number of latest collectives whose completion is known.

_NAMES = (
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all"),
    *("all_to_all_single", "barrier", "all_gather_single", "reduce_scatter_single"),
)
_BEFORE = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""Names of torch before 2.13."""


@dataclass(slots=True, eq=False)
class Begun:
    """One collective."""

    name: str  # Of the function that began it.
    group: str  # The name of its group.
    number: int  # Among the collectives of its group, counted from 1: all ranks of the group count in the same way.
    since: float = field(default_factory=time.monotonic)  # When it began.
    has_returned: bool = False  # Whether the function has: the collective is complete, or `work` says when it is.
    work: Callable[[], Any] | None = None
    """A weak reference, as nobody waits for work that is not referred to any more; None without any."""

    def is_complete(self) -> bool:
        """Whether the collective waits for no rank any more."""
        work = None if self.work is None else self.work()
        return self.has_returned and (work is None or work.is_completed())


class Collectives:
    """The collectives that this rank has begun."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}  # How many collectives of each group, by its name.
        self.ranks: dict[str, list[int]] = {}  # The ranks of each group, as numbers in the job.
        self._recent: deque[Begun] = deque(maxlen=MOST_REMEMBERED)
        self._asynchronous: set[str] = set()

    def begin(self, name: str, group: dist.ProcessGroup) -> Begun:
        """Notes that a collective begins."""
        key = group.group_name
        number = self.counts[key] = self.counts.get(key, 0) + 1
        if number == 1:
            self.ranks[key] = dist.get_process_group_ranks(group)
            if dist.get_backend(group) == "nccl":
                self._asynchronous.add(key)
        begun = Begun(name, key, number)
        if key not in self._asynchronous:  # torch's own watchdog sees what a GPU waits for; nobody else may ask
            self._recent.append(begun)
        return begun

    def waiting(self) -> Begun | None:
        """The first collective that is not complete; None if all are."""
        return next((begun for begun in self._recent.copy() if not begun.is_complete()), None)


@contextlib.contextmanager
def noted() -> Iterator[Collectives]:
    """A context in which Python's calls of torch.distributed's collectives are noted, and those that distconv makes
    itself; not those of compiled graphs."""
    collectives = Collectives()
    names = [name if hasattr(dist, name) else _BEFORE[name] for name in _NAMES]
    noting = {name: _noting(getattr(dist, name), collectives) for name in names}
    own = {function.__name__: _noting(function, collectives) for function in group_calls.FUNCTIONS}
    with (
        substituted(dist, **noting),
        substituted(distributed_c10d, **noting),
        substituted(group_calls, **own),
    ):
        yield collectives


def _noting(function: Callable[..., Any], collectives: Collectives) -> Callable[..., Any]:
    name = function.__name__
    position = list(inspect.signature(function).parameters).index("group")

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        group = args[position] if len(args) > position else kwargs.get("group")
        group = dist.group.WORLD if group is None else group
        # This rank is no member of it, or its parts wait for each other: who waits for other ranks is their caller.
        if not isinstance(group, dist.ProcessGroup) or thread.part is not None:
            return function(*args, **kwargs)
        begun = collectives.begin(name, group)
        try:
            work = function(*args, **kwargs)
            begun.work = None if work is None else weakref.ref(work)
            return work
        finally:
            begun.has_returned = True

    return collective
