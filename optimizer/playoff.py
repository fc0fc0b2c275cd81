"""Playoff: compares a few contenders with a baseline and with each other, one call each in turn, until one has won."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

BASELINE = -1  # The baseline's place among the contenders.

ROUNDS = 3

CLOSE = 2.0  # A contender that is expected to take more than so many times as long as one that has played is left out.

DECISIVE = 0.5  # The baseline is not called again if the best contender takes less than this share of its time.


class Playoff:
    """Rounds in which the baseline and every contender that is left take a turn.

    What counts is a contender's time in units of the baseline's in the same round, as a change of the machine's speed
    falls on both. After the last round a contender replaces the baseline only if the upper quartile of these ratios is
    at most 1 - margin, so only if it is faster nearly always. The winner is the one with the least median.

    Attributes:
        winner: the place of who has won, `BASELINE` for the baseline; `None` until then.
        ratios: of each contender, a number per round.
    """

    def __init__(
        self, margins: Sequence[float], baseline: float, seconds: Sequence[float], plays_baseline: bool = True
    ) -> None:
        """
        Args:
            margins: of each contender, the share of the baseline's time by which it must be faster.
            baseline: what is known of the baseline's seconds.
            seconds: that are expected of each contender.
            plays_baseline: whether the baseline may be called.
        """
        self._margins, self._plays_baseline = margins, plays_baseline
        self._known, self._expected = baseline, seconds
        self.ratios: list[list[float]] = [[] for _ in margins]
        self.winner: int | None = None if margins else BASELINE
        self._left = list(range(len(margins)))
        self._round: dict[int, float] = {}

    def next(self) -> int:
        """The contender whose turn it is: a place or `BASELINE`."""
        if self._plays_baseline and BASELINE not in self._round and min(map(self.expected, self._left)) >= DECISIVE:
            return BASELINE
        return next(place for place in self._left if place not in self._round)

    def learn(self, place: int, seconds: float) -> None:
        """Notes the seconds of a call."""
        if self.winner is not None or (place != BASELINE and place not in self._left):
            return
        self._round[place] = seconds
        best = min((took for other, took in self._round.items() if other != BASELINE), default=math.inf)
        most = CLOSE * best / max(self._round.get(BASELINE, self._known), 1e-12)
        self._left = [other for other in self._left if other in self._round or self.expected(other) <= most]
        self._judge()

    def drop(self, place: int) -> None:
        """Removes a contender that cannot be computed."""
        self._left = [other for other in self._left if other != place]
        self._judge()

    def ratio(self, place: int) -> float:
        """The upper quartile of a contender's times, in units of the baseline's."""
        ratios = self.ratios[place]
        return statistics.quantiles(ratios, n=4, method="inclusive")[2] if len(ratios) > 1 else ratios[0]

    def expected(self, place: int) -> float:
        """The expected time of a contender's next call, in units of the baseline's: the median of its rounds."""
        ratios = self.ratios[place]
        return statistics.median(ratios) if ratios else self._expected[place] / max(self._known, 1e-12)

    def _judge(self) -> None:
        """Ends the round once all have had their turn, and after the last one names the winner."""
        if not self._round.keys() >= set(self._left):
            return
        baseline = self._round.get(BASELINE, self._known)
        for place in self._left:
            self.ratios[place].append(self._round[place] / max(baseline, 1e-12))
        self._round = {}
        if not self._left or len(self.ratios[self._left[0]]) == ROUNDS:
            fast = [place for place in self._left if self.ratio(place) <= 1 - self._margins[place]]
            self.winner = min(fast, key=self.expected, default=BASELINE)
