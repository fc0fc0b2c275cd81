"""How the convolutions of one shape and direction are computed from their first call on: the states of a decision.

| state | entered | at a call | left |
|---|---|---|---|
| awaited | live, at a first call with nothing on record | torch's own kernel | watched, at the second call |
| watched | live, at the first call that is not awaited | torch's own, one call timed | explored; left, if too short |
| explored | when calls took 20 times what a preparation does | a trial, or torch's own | fixed, by what has won |
| fixed | when a plan is found: live, ahead or on record | the plan, or the next best | left, if torch's own is best |
| left | when torch's own kernel is best, or no other serves | torch's own kernel | begun anew, with less memory |

Awaited convolutions have no object, left ones are `None`, and the others a `Decision` of that name: who holds one puts
what is `after` it in its place. Where calls may use different numbers of bytes, each number has its own decision
(`ByBytes`): `StepBudget` for the budgets of a training step, `SharedTotal` for shares of a total.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from mucudnn.convolution.call import Call
from mucudnn.planning.plan import Plan
from mucudnn.process import Recent
from mucudnn.reporting.record import Record

MOST_NUMBERS = 256  # The most numbers of bytes whose decisions are kept, of one convolution.


class Decision:
    """A state of the convolutions of one shape and direction; the module's docstring lists them.

    Attributes:
        rest: how many of the next calls the caller may leave to torch's own kernel without `run`; it counts them.
        after: the state that has taken the place of this one, if that is not left.
        is_left: whether torch's own kernel computes the convolutions from now on.
        plan: the settled one.
    """

    rest = _resting = 0
    after: Decision | None = None
    is_left = False
    plan: Plan | None = None

    @property
    def latest(self) -> Decision:
        """The present state."""
        return self if self.after is None else self.after.latest

    @property
    def workspace(self) -> int:
        """Bytes that a call may need now."""
        return 0

    def run(self, call: Call) -> torch.Tensor | None:
        """The call's result, in the strides of torch's own; `None` where torch's own kernel is to compute it."""
        raise NotImplementedError

    def records(self) -> list[Record]:
        """A record, for people, of every plan in use."""
        raise NotImplementedError

    def _wake(self) -> tuple[int, int]:
        """Ends a rest: of how many calls it was to be, and how many it was of."""
        rested, skipped = self._resting, self._resting - self.rest
        self.rest = self._resting = 0
        return rested, skipped


Decide = Callable[[Call, int], Decision | None]
"""Makes the decision on a call within so many bytes; `None` where that cannot be measured."""


class ByBytes(Decision):
    """The decisions on one convolution by the number of bytes that a call may use, each made at its first use.

    Attributes:
        made: those so far; `None` where torch's own kernel serves.
    """

    def __init__(
        self, planning: AbstractContextManager[object], decide: Callable[[Call, int], Decision | None]
    ) -> None:
        """``planning``: the lock of the thread that plans."""
        self._planning, self._decide = planning, decide
        self.made: Recent[int, Decision | None] = Recent(MOST_NUMBERS)

    def within(self, size: int, call: Call) -> Decision | None:
        """The decision for a number of bytes, made for this call if there is none; `None` for torch's own kernel."""
        if size not in self.made:
            with self._planning:
                if size not in self.made:
                    self.made[size] = self._decide(call, size)
        found = self.made.get(size)
        if found is not None and found.after is not None:
            found = self.made[size] = found.latest
        return None if found is None or found.is_left else found

    def records(self) -> list[Record]:
        """Those for each number of bytes, as the limit."""
        return [record for one in list(self.made.values()) if one is not None for record in one.latest.records()]


class _Mark(threading.local):
    is_own = False


_mark = _Mark()

marking: set[str] = set()
"""The types of devices whose plans depend on which convolutions are local work, by the session that serves now."""


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
