"""Overhead budget: the time that trials may add to a program, as a share of the time of its calls."""

from __future__ import annotations

RATE, LATER_RATE, FIRST_CALLS = 0.03, 0.005, 10
"""Trials may slow down the first `FIRST_CALLS` calls of each convolution by this share of the baseline's time, and all
later ones by that: so by a third of a step in the first 10 steps of a program, and by half of one in 50."""


class OverheadBudget:
    """Seconds that trials may lose. Every call earns a share of its baseline time, and faster calls earn what they
    save.

    After any number of calls, the time lost against the baseline is at most `rate` times the baseline's time for these
    calls, plus the excess of trials over the times that were expected when they were granted. A trial that takes longer
    than expected leaves a debt. Until the debt is paid, a trial is granted only if it is known to be faster than the
    baseline, or is expected to pay the whole debt.

    Attributes:
        balance: seconds that may be lost now; negative after a trial that took longer than expected.
    """

    def __init__(self, balance: float = 0.0) -> None:
        """``balance``: at first; infinite to grant everything."""
        self.balance = balance

    def grants(self, seconds: float, *, is_known: bool = False) -> bool:
        """Whether a call may take so many seconds more than the baseline, by what is expected of it.

        ``is_known``: whether the expectation was measured; otherwise it may be far off.
        """
        return seconds <= self.balance or (is_known and seconds <= 0)

    def count(self, baseline: float, seconds: float | None = None, rate: float = RATE) -> None:
        """Notes a call.

        Args:
            baseline: seconds of the baseline for this call.
            seconds: of the call itself; the baseline's if not given.
            rate: the share that it earns; not negative.
        """
        lost = 0.0 if seconds is None else seconds - baseline
        self.balance += rate * baseline - lost

    def earn(self, seconds: float, calls: int, before: int) -> None:
        """Notes calls of a convolution by the baseline.

        Args:
            seconds: of one of them.
            before: how many calls of the convolution there were before these.
        """
        first = min(calls, max(FIRST_CALLS - before, 0))
        self.balance += seconds * (RATE * first + LATER_RATE * (calls - first))
