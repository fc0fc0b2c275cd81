"""How the convolutions of one shape and direction are computed from their first call on: the states of a decision.

| state | object | what computes a call | next state |
|---|---|---|---|
| awaited | none | torch's own kernel | watched, at the second call; under planning ahead, fixed at the first |
| watched | `Live` | torch's own kernel; the second call is timed | explored, once that is worth its cost; or left |
| explored | `Live` with `Explored` | trials of divisions, and torch's own kernel | fixed, once a division has won |
| fixed | `FixedLimit` | the plan; the next best one where an algorithm fails | left, if that is torch's own kernel |
| left | `None` | torch's own kernel | |

Where calls may use different numbers of bytes, there is one such decision for each number (`ByBytes`): `StepBudget` for
each budget of a training step, `SharedTotal` for each share of a total. In a job of several processes the session has
one for a process's local work, and one for convolutions that several of them compute on the same data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import torch

from mucudnn.convolution.call import Call
from mucudnn.planning.plan import Plan
from mucudnn.process import Recent
from mucudnn.reporting.record import Record

_UNKNOWN: Any = object()

MOST_NUMBERS = 256  # The most numbers of bytes whose decisions are kept, of one convolution.


class Decision(Protocol):
    """How the convolutions of one shape and direction are computed; the module's docstring lists the classes."""

    rest: int
    """How many of the next calls the caller may leave to torch's own kernel without calling `run`; it counts them."""

    @property
    def is_left(self) -> bool:
        """Whether torch's own kernel computes the convolutions from now on."""

    def run(self, call: Call) -> torch.Tensor | None:
        """The call's result, in the strides of torch's own; `None` where torch's own kernel is to compute it."""
        ...

    def records(self) -> list[Record]:
        """A record, for people, of every plan in use."""
        ...


class Bounded(Decision, Protocol):
    """A decision within one number of bytes of workspace."""

    @property
    def plan(self) -> Plan | None:
        """The settled plan; `None` before there is one."""

    @property
    def workspace(self) -> int:
        """Bytes that a call may need now."""


class ByBytes:
    """The decisions on one convolution by the number of bytes that a call may use, each made at its first use.

    Attributes:
        made: those so far; `None` where torch's own kernel serves.
    """

    rest = 0

    def __init__(self, planning: AbstractContextManager[object], decide: Callable[[Call, int], Bounded | None]) -> None:
        """
        Args:
            planning: the lock of the thread that plans.
            decide: what computes a call within so many bytes, `None` where that cannot be measured.
        """
        self._planning, self._decide = planning, decide
        self.made: Recent[int, Bounded | None] = Recent(MOST_NUMBERS)

    def within(self, size: int, call: Call) -> Bounded | None:
        """The decision for a number of bytes, made for this call if there is none; `None` for torch's own kernel."""
        found = self.made.get(size, _UNKNOWN)
        if found is _UNKNOWN:
            with self._planning:
                found = self.made.get(size, _UNKNOWN)
                if found is _UNKNOWN:
                    found = self.made[size] = self._decide(call, size)
        return None if found is None or found.is_left else found


class _Mark(threading.local):
    is_own = False


_mark = _Mark()


def is_local_work() -> bool:
    """Whether this thread's convolutions are marked as local work."""
    return _mark.is_own


class LocalWork:
    """A context that marks the thread's convolutions as local work, which no other process computes on the same data.

    Processes that compute the same must round in the same way, or their replicas drift apart. So they may only use
    plans on which all have agreed. A process may compute its own part of the data by any division at any time.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, _mark.is_own = _mark.is_own, True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _mark.is_own = self._before
