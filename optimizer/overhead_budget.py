"""Overhead budget: the time that trials may add to a program, as a share of the time of its calls."""

from __future__ import annotations

import math

RATE = 0.1
"""Trials may slow down all calls together by this share of the baseline's time."""


class OverheadBudget:
    """Seconds that trials may lose. Every call earns a share of its baseline time, and faster calls earn what they
    save.

    After any number of calls, the time lost against the baseline is at most `rate` times the baseline's time for these
    calls, plus the excess of trials over the times that were expected when they were granted. A trial that takes longer
    than expected leaves a debt. Until the debt is paid, a trial is granted only if it is known to be faster than the
    baseline, or is expected to pay the whole debt.

    Attributes:
        balance: seconds that may be lost now; negative after a trial that took longer than expected.
        lost: seconds of all calls beyond the baseline; faster calls count negative.
        earned: seconds of the baseline for all calls that were counted.
    """

    def __init__(self, rate: float = RATE) -> None:
        """
        Args:
            rate: not negative; infinite to grant everything.
        """
        self._rate = rate
        self.lost = 0.0
        self.earned = 0.0

    @property
    def balance(self) -> float:
        return math.inf if self._rate == math.inf else self._rate * self.earned - self.lost

    def grants(self, seconds: float, *, is_known: bool = False) -> bool:
        """Whether a call may take so many seconds more than the baseline, by what is expected of it.

        Args:
            is_known: whether the expectation was measured; otherwise it may be far off.
        """
        return seconds <= self.balance or (is_known and seconds <= 0)

    def count(self, baseline: float, seconds: float | None = None) -> None:
        """Notes a call.

        Args:
            baseline: seconds of the baseline for this call.
            seconds: of the call itself; the baseline's if not given.
        """
        self.earned += baseline
        if seconds is not None:
            self.lost += seconds - baseline
