"""Cost model: the expected time of a launch and its uncertainty, fitted to the launches that were timed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

SURE = 1.0
"""Standard deviations within which a forecast is taken to be right, once many groups are known: 84 of 100 launches do
not take less. Two would be right for 98, and double what planning takes for a gain of about 1 % of a step."""

SLOPE = 0.3  # The standard deviation of a power of a size before anything was timed.

SPREAD, WITHIN, WEIGHT = 0.4, 0.1, 4.0
"""Standard deviations of the logarithm between groups and within one before anything was timed, and the number of
timed launches that this counts for."""

BLUNT = 1.5  # Launches that deviate by more standard deviations than this count for less, as in Huber's estimate.

ROUNDS = 4

MOST = 400  # Launches of one kind that are kept, the latest.


class Forecast(NamedTuple):
    """The expected time of a launch.

    Attributes:
        seconds: the median of the forecast.
        uncertainty: the factor, at least 1, within which the forecast is nearly surely right.
    """

    seconds: float
    uncertainty: float


class Costs:
    """Seconds of launches of several kinds, each fitted as a product of powers of sizes.

    The logarithm of the seconds is linear in those of the sizes, with normal errors: one that the launches of a group
    share, such as the parts of one convolution, and one of each launch. Before anything was timed, time is expected to
    grow with the first size and with no other, each power within `SLOPE`; so a kind of which a single launch is known
    has forecasts, which are vague for launches unlike it. It is a Bayesian linear regression, with Huber's weights so
    that single outliers do not count, and the best linear prediction of what a group shares.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def add(self, kind: Hashable, group: Hashable, sizes: Sequence[float], seconds: float) -> None:
        """Notes a launch.

        Args:
            kind: of launches that are compared.
            group: of launches that share an unknown factor beside their sizes.
            sizes: positive, always as many of a kind, in one order; time grows with the first.
            seconds: that it took, positive.
        """
        if seconds > 0:
            self._kinds.setdefault(kind, _Kind()).add(group, np.log(np.array(sizes, dtype=np.float64)), seconds)

    def groups(self, kind: Hashable, least: int) -> int:
        """The number of groups of a kind with at least `least` known launches."""
        known = self._kinds.get(kind)
        return 0 if known is None else sum(count >= least for count in Counter(known.groups).values())

    def forecast(self, kind: Hashable, group: Hashable, sizes: Sequence[float]) -> Forecast | None:
        """The expected time of a launch; `None` if no launch of its kind is known."""
        known = self._kinds.get(kind)
        return None if known is None else known.forecast(group, np.log(np.array(sizes, dtype=np.float64)))


class _Fit(NamedTuple):
    """The fitted model of a kind.

    Attributes:
        powers: of the sizes, the constant first.
        covariance: of these.
        left: of every launch, the logarithm that the powers do not explain.
        between, within: variances of that.
    """

    powers: Numbers
    covariance: Numbers
    left: Numbers
    between: float
    within: float


@dataclass
class _Kind:
    """The launches of one kind: of each the hash of its group, 1 and the logarithms of its sizes, and its rate."""

    groups: list[int] = field(default_factory=list)
    rows: list[Numbers] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    fit: _Fit | None = None

    def add(self, group: Hashable, logs: Numbers, seconds: float) -> None:
        self.groups.append(hash(group))
        self.rows.append(np.concatenate(([1.0], logs)))
        self.rates.append(math.log(seconds) - float(logs[0]))
        if len(self.groups) > MOST:
            del self.groups[0], self.rows[0], self.rates[0]
        self.fit = None

    def forecast(self, group: Hashable, logs: Numbers) -> Forecast:
        fit = self.fit = self.fit or self._fitted()
        row = np.concatenate(([1.0], logs))
        rate, shared = float(row @ fit.powers), fit.between
        number = hash(group)
        mine = [place for place, other in enumerate(self.groups) if other == number]
        if mine:
            known = fit.between / (fit.between + fit.within / len(mine))
            rate += known * float(fit.left[mine].mean())
            row = row - known * np.mean([self.rows[place] for place in mine], axis=0)
            shared *= 1 - known
        variance = float(row @ fit.covariance @ row) + shared + fit.within
        # The spread of few groups is not known well: Student's t, where SURE is 1, is 1.84 for one degree of freedom,
        # 1.32 for two and 1.11 for five.
        sure = SURE * (1 + 0.84 * len(set(self.groups)) ** -1.4)
        return Forecast(math.exp(rate + float(logs[0])), math.exp(sure * math.sqrt(variance)))

    def _fitted(self) -> _Fit:
        x, y = np.array(self.rows), np.array(self.rates)
        _, places, found = np.unique(np.array(self.groups), return_inverse=True, return_counts=True)
        counts = found.astype(np.float64)
        before = np.diag([1e-4] + [SLOPE**-2] * (x.shape[1] - 1))
        between, within, left = SPREAD**2, WITHIN**2, np.zeros(len(y))
        for turn in range(ROUNDS):
            total = between + within
            off = np.abs(left) / math.sqrt(total)
            weights = np.minimum(1.0, BLUNT / np.maximum(off, 1e-9)) if turn else np.ones(len(y))
            # Launches of a group repeat each other as far as their errors are shared.
            weights = weights / (1 + (counts[places] - 1) * between / total)
            information = (x.T * weights) @ x / total
            covariance = np.asarray(np.linalg.inv(information + before), dtype=np.float64)
            powers = np.asarray(covariance @ ((x.T * weights) @ y) / total, dtype=np.float64)
            left = y - x @ powers
            means = np.bincount(places, left) / counts
            clipped = np.clip(left - means[places], -3 * math.sqrt(within), 3 * math.sqrt(within))
            within = (WEIGHT * WITHIN**2 + float(clipped @ clipped)) / (WEIGHT + len(y) - len(counts))
            used = float(np.trace(covariance @ information))
            clipped = np.clip(means, -3 * math.sqrt(total), 3 * math.sqrt(total))
            squares = WEIGHT * SPREAD**2 + float(clipped @ clipped)
            between = max(squares / (WEIGHT + max(len(counts) - used, 0.0)) - within / counts.mean(), 1e-4)
        return _Fit(powers, covariance, left, between, within)
