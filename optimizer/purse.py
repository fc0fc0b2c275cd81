"""Purse: what exploring may cost, as a share of what the program's own calls take."""

from __future__ import annotations

import math

RATE = 0.1
"""Exploring may make the calls that it watches slower by this share of the baseline's time, all of them together."""


class Purse:
    """Seconds that exploring may lose, earned by the calls that are made anyway and by what faster calls save.

    After any number of calls, what they took more than the baseline would have is at most `rate` times the baseline's
    time for them, plus what trials took more than was expected of them when they were granted. A trial that turns out
    dearer than expected leaves a debt. Until that is paid only what is known to be faster than the baseline is granted,
    and what is expected to pay all of the debt.

    Attributes:
        balance: seconds that may be lost now; negative after a trial that took longer than expected.
        lost: seconds that calls have taken more than the baseline, the faster ones counted against the slower.
        earned: seconds of the baseline for all calls that were counted.
    """

    def __init__(self, rate: float = RATE) -> None:
        """
        Args:
            rate: not negative; infinite where anything is granted.
        """
        self._rate = rate
        self.lost = 0.0
        self.earned = 0.0

    @property
    def balance(self) -> float:
        return math.inf if self._rate == math.inf else self._rate * self.earned - self.lost

    def grants(self, seconds: float, *, is_known: bool = False) -> bool:
        """Whether a call may be made that is expected to take so many seconds more than the baseline.

        Args:
            is_known: whether that is expected because it was timed; if not, it may be far from true.
        """
        return seconds <= self.balance or (is_known and seconds <= 0)

    def count(self, baseline: float, seconds: float | None = None) -> None:
        """Notes a call.

        Args:
            baseline: seconds that the baseline takes for it.
            seconds: that it took; as the baseline if not given.
        """
        self.earned += baseline
        if seconds is not None:
            self.lost += seconds - baseline
