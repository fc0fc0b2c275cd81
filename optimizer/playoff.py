"""Playoff: compares a few contenders with a baseline and with each other, one call each in turn, until one has won."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

BASELINE = -1
"""The baseline's place among the contenders."""

LEAST_ROUNDS, MOST_ROUNDS = 3, 5

CLEARLY = 0.9
"""The last contender has won before `MOST_ROUNDS` if it always takes less than `CLEARLY` of what it may."""

DECISIVE = 0.5
"""The baseline is not called again if the best contender takes less than this share of its time."""


class Playoff:
    """Rounds in which the baseline and every contender that is left take a turn.

    What counts is a contender's time in units of the baseline's in the same round, as a change of the machine's speed
    falls on both. A contender replaces the baseline only if the upper quartile of these ratios is below 1 - margin, so
    only if it is faster nearly always. From the third round on it is out if its lower quartile is above that, or above
    the upper quartile of the best. The winner is the one with the least median.

    Attributes:
        winner: the place of who has won, `BASELINE` for the baseline; `None` until then.
        ratios: of each contender, a number per round.
    """

    def __init__(self, margins: Sequence[float], baseline: float, seconds: Sequence[float]) -> None:
        """
        Args:
            margins: of each contender, the share of the baseline's time by which it must be faster.
            baseline: what is known of the baseline's seconds.
            seconds: that are expected of each contender.
        """
        self._margins = margins
        self._known, self._expected = baseline, seconds
        self.ratios: list[list[float]] = [[] for _ in margins]
        self.winner: int | None = None if margins else BASELINE
        self._left = list(range(len(margins)))
        self._round: dict[int, float] = {}

    def next(self) -> int:
        """The contender whose turn it is: a place or `BASELINE`."""
        if BASELINE not in self._round and not self._is_decided():
            return BASELINE
        return next(place for place in self._left if place not in self._round)

    def learn(self, place: int, seconds: float) -> None:
        """Notes the seconds of a call."""
        if self.winner is not None or (place != BASELINE and place not in self._left):
            return
        self._round[place] = seconds
        if all(place in self._round for place in self._left):
            baseline = self._round.get(BASELINE, self._known)
            for place in self._left:
                self.ratios[place].append(self._round[place] / max(baseline, 1e-12))
            self._round = {}
            self._judge()

    def drop(self, place: int) -> None:
        """Removes a contender that cannot be computed."""
        self._left = [other for other in self._left if other != place]
        if not self._left:
            self.winner = BASELINE

    def ratio(self, place: int) -> float:
        """The upper quartile of a contender's times, in units of the baseline's."""
        return _quartiles(self.ratios[place])[2]

    def expected(self, place: int) -> float:
        """The expected time of a contender's next call, in units of the baseline's: the median of its rounds."""
        ratios = self.ratios[place]
        return statistics.median(ratios) if ratios else self._expected[place] / max(self._known, 1e-12)

    def _is_decided(self) -> bool:
        """Whether the baseline is so much slower that no further call of it is needed."""
        first = min(self._left, key=self.expected)
        return self.expected(first) < DECISIVE

    def _judge(self) -> None:
        rounds = len(self.ratios[self._left[0]])
        if rounds < LEAST_ROUNDS:
            return
        quartiles = {place: _quartiles(self.ratios[place]) for place in self._left}
        first = min(self._left, key=lambda place: quartiles[place][1])
        low = {place: quartiles[place][0] for place in self._left}
        self._left = [n for n in self._left if low[n] <= self._most(n) and low[n] <= quartiles[first][2]]
        if not self._left:
            self.winner = BASELINE
        elif rounds >= MOST_ROUNDS or self._is_clear():
            best = min(self._left, key=lambda place: quartiles[place][1])
            self.winner = best if quartiles[best][2] <= self._most(best) else BASELINE

    def _is_clear(self) -> bool:
        """Whether one contender is left, and always took less than it may by far."""
        last = self._left[0]
        return len(self._left) == 1 and max(self.ratios[last]) < CLEARLY * self._most(last)

    def _most(self, place: int) -> float:
        """What a contender may take, in units of the baseline."""
        return 1 - self._margins[place]


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
