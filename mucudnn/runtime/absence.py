"""Takes mucudnn's kernels out of torch for some training steps, in which torch's own would compute all convolutions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import get_ident

from mucudnn.runtime.decision import Decision

MOST_STEPS = 15  # The most steps of optimizers without a look at any convolution.


class Absence:
    """Decides for which steps of optimizers the shim takes its kernels out of torch's dispatcher.

    To call Python at each convolution of a small network costs 1 to 4 % of a step, as little that it reads is in a
    cache by then. It is of no use where all stay with torch's own kernel. After a step in which torch's kernel has
    computed all convolutions, and nothing was decided or timed, the kernels are out for 1, 3, 7 and then 15 steps, with
    one step between in which new shapes are decided and trials go on, if the steps before have earned their time.

    Attributes:
        is_out: whether the kernels are out now.
        is_busy: whether a convolution was decided or computed here since the last step; the shim notes it.
        threads: the threads that have called a convolution since the last step; the shim notes them.
        steps, without: steps of optimizers so far, and those of them without the kernels.
    """

    def __init__(self, decisions: dict[Hashable, Decision | None], may_be: bool) -> None:
        """
        Args:
            decisions: of the session.
            may_be: whether the kernels may be taken out at all: no limit and no other process depends on them.
        """
        self._decisions, self._may_be = decisions, may_be
        self.is_out = self.is_busy = False
        self.threads: set[int] = set()
        self.steps = self.without = 0
        self._every: set[int] = set()
        self._planned, self._done = 0, 0
        self._rests: dict[Decision, int] | None = None
        self._called: list[Decision] = []

    def step(self, may_change: Callable[[], bool]) -> None:
        """Notes that an optimizer has made a step.

        ``may_change``: whether torch's table of kernels may be changed now.
        """
        self.steps += 1
        if self.is_out:
            self.without += 1
            self._done += 1
            if self._done >= self._planned:
                self.end(may_change)
        elif self.threads and self._may_be:
            self._every |= self.threads
            self.threads.clear()
            before, self._rests = self._rests, None if self.is_busy else self._look()
            self.is_busy = False
            if before is not None and self._rests is not None and self._every == {get_ident()} and may_change():
                self._called = [decision for decision, rest in before.items() if decision.rest != rest]
                self._planned, self._done = min(2 * self._planned + 1, MOST_STEPS), 0
                self.is_out = True

    def end(self, may_change: Callable[[], bool]) -> None:
        """Has the kernels called again."""
        if self.is_out and may_change():
            for decision in self._called:
                decision.rest -= self._done  # as if the shim had seen one call a step
            self.is_out, self._rests = False, self._look()

    def _look(self) -> dict[Decision, int]:
        return {decision: decision.rest for decision in self._decisions.values() if decision is not None}

    def notices(self) -> list[str]:
        """For how many steps the kernels were out, in a sentence; none where they never were."""
        kind = f"in {self.without} of {self.steps} steps of optimizers torch called its own kernels directly"
        return [f"{kind}, as these had computed all convolutions of the steps before"] if self.without else []
