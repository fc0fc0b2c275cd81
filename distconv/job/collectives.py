"""Keeps the collectives that this rank has begun, and which of them are not complete."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from distconv.turns.world import is_part
from mucudnn.process.substitution import substituted

MOST_REMEMBERED = 256  # The number of latest collectives whose completion is known.

_NAMES = (
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all"),
    *("all_to_all_single", "barrier", "all_gather_single", "reduce_scatter_single"),
)
_BEFORE = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""Names of torch before 2.13."""


class Begun:
    """One collective.

    Attributes:
        name: of the function that began it.
        group: the name of its group.
        number: among the collectives of its group, counted from 1: all ranks of the group count in the same way.
        since: of time.monotonic(), when it began.
    """

    __slots__ = ("_returned", "_work", "group", "name", "number", "since")

    def __init__(self, name: str, group: str, number: int) -> None:
        self.name, self.group, self.number, self.since = name, group, number, time.monotonic()
        self._returned = False
        self._work: Callable[[], Any] | None = None

    def returned(self, work: Any) -> None:
        """The function has returned: the collective is complete, or `work` says when it is."""
        if work is not None:
            self._work = weakref.ref(work)  # nobody waits for work that is not referred to any more
        self._returned = True

    def is_complete(self) -> bool:
        """Whether no rank is waited for any more."""
        work = None if self._work is None else self._work()
        return self._returned and (work is None or work.is_completed())


class Collectives:
    """The collectives that this rank has begun."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}  # How many collectives of each group, by its name.
        self.ranks: dict[str, list[int]] = {}  # Of each group, as numbers of the job.
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
        """The one that was begun first among those that are not complete."""
        return next((begun for begun in self._recent.copy() if not begun.is_complete()), None)


@contextlib.contextmanager
def noted() -> Iterator[Collectives]:
    """A context in which Python's calls of torch.distributed's collectives are noted; not those of compiled graphs."""
    collectives = Collectives()
    names = [name if hasattr(dist, name) else _BEFORE[name] for name in _NAMES]
    noting = {name: _noting(getattr(dist, name), collectives) for name in names}
    with substituted(dist, **noting), substituted(distributed_c10d, **noting):
        yield collectives


def _noting(function: Callable[..., Any], collectives: Collectives) -> Callable[..., Any]:
    name = function.__name__
    position = list(inspect.signature(function).parameters).index("group")

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        group = args[position] if len(args) > position else kwargs.get("group")
        group = dist.group.WORLD if group is None else group
        # This rank is no member of it, or its parts wait for each other: who waits for other ranks is their caller.
        if not isinstance(group, dist.ProcessGroup) or is_part():
            return function(*args, **kwargs)
        begun = collectives.begin(name, group)
        work = None
        try:
            work = function(*args, **kwargs)
        finally:
            begun.returned(work)
        return work

    return collective
