"""A backend of torch.distributed whose messages leave late on some ranks: one over Gloo, one over MPI."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

import torch
import torch.distributed as dist

OPERATIONS = (
    *("allreduce", "reduce", "broadcast", "allgather", "all_gather_single", "gather", "scatter", "reduce_scatter"),
    *("reduce_scatter_single", "all_to_all_single", "alltoall", "barrier"),
)
_BEFORE = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Their names before torch 2.13, which its own groups have still."""


class Lateness:
    """How late this rank's messages are.

    Attributes:
        seconds: the most that passes before an operation is handed on; 0: nothing does.
        count: how many were late.
    """

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        self._random = Random()
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._hand_on, name="late", daemon=True).start()

    def draw(self, seconds: float, seed: str) -> None:
        """From now on messages are up to so many seconds late."""
        self.seconds, self._random = seconds, Random(seed)

    def hand_on(self, operation: Callable[[], None]) -> None:
        """Has an operation done in its turn, later."""
        self._waiting.put(operation)

    def _hand_on(self) -> None:
        while True:
            operation = self._waiting.get()
            if self.seconds:
                time.sleep(self._random.uniform(0, self.seconds))
                self.count += 1
            operation()


lateness = Lateness()
"""Of this process."""


class LateWork(dist.Work):
    """An operation that is handed on later."""

    def __init__(self, operation: Callable[[], Any]) -> None:
        super().__init__()
        self._operation: Callable[[], Any] | None = operation
        self._handed_on = threading.Event()
        self._work: Any = None
        self._error: BaseException | None = None
        lateness.hand_on(self._begin)

    def _begin(self) -> None:
        assert self._operation is not None
        try:
            self._work = self._operation()
        except BaseException as error:
            self._error = error
        self._operation = None
        self._handed_on.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._handed_on.wait()
        if self._error is not None:
            raise self._error
        if self._work is not None:
            self._work.wait()
        return True

    def is_completed(self) -> bool:
        return self._handed_on.is_set() and (self._work is None or self._work.is_completed())

    def synchronize(self) -> None:
        self.wait()


_ProcessGroup: Any = dist.ProcessGroup  # its overloads are for callers


class LateGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group that hands its operations on to another, in their order, some of them late."""

    def __init__(self, within: Any, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self.within, self._rank, self._size, self._name = within, rank, size, name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return "late"

    def _get_backend(self, device: torch.device) -> LateGroup:
        return self


def _late(name: str) -> Callable[..., LateWork]:
    def operation(self: LateGroup, *args: Any, **kwargs: Any) -> LateWork:
        within = getattr(self.within, name, None) or getattr(self.within, _BEFORE[name])
        return LateWork(lambda: within(*args, **kwargs))

    return operation


for _name in OPERATIONS:
    for _each in (_name, _BEFORE.get(_name, _name)):
        setattr(LateGroup, _each, _late(_name))


def over_gloo(options: Any, _: Any) -> LateGroup:
    """Called on the members of a group, as torch makes it."""
    rank, size = options.group_rank, options.group_size
    within = dist.ProcessGroupGloo(options.store, rank, size, options.timeout)  # type: ignore[attr-defined]
    return LateGroup(within, rank, size, options.group_id)


def over_mpi(options: Any, _: Any) -> LateGroup:
    """The same over mpi4py."""
    from distconv.mpi.group import create

    within = create(options, None)
    return LateGroup(within, within.rank(), within.size(), options.group_id)


dist.Backend.register_backend("late", over_gloo, extended_api=True, devices=["cpu"])
dist.Backend.register_backend("late_mpi", over_mpi, extended_api=True, devices=["cpu"])
