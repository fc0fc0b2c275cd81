"""Relative times: forecasts of an algorithm's time for a problem, from its times for similar problems."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEAST_UNCERTAINTY = 2.0
"""The factor within which a forecast holds for a problem of exactly the same sizes."""

MOST_UNCERTAINTY = 10.0
"""Problems are not similar if the uncertainty would be larger: neither gives a forecast for the other."""

MOST_PROBLEMS = 1024
"""The latest problems that are kept for each algorithm. A forecast compares with all of them."""

Sizes = tuple[float, ...]
"""The positive numbers that a problem's time depends on, such as flops and channels: always as many, in one order."""


class RelativeTimes:
    """Times of algorithms in units of the baseline's time for the same problem, by the sizes of the problem.

    A forecast is the relative time of the nearest problem. The distance of two problems is the sum of the absolute
    differences of the logarithms of their sizes. With every unit of distance the uncertainty grows by the factor e.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[Sizes, float]] = {}
        self._logs: dict[str, npt.NDArray[np.float64]] = {}  # of the sizes, a row each, in the order of `_known`

    def add(self, algorithm: str, sizes: Sequence[float], ratio: float) -> None:
        """Notes the time of an algorithm, in units of the baseline's."""
        known = self._known.setdefault(algorithm, {})
        if tuple(sizes) not in known:
            self._logs.pop(algorithm, None)
        known[tuple(sizes)] = ratio
        if len(known) > MOST_PROBLEMS:
            del known[next(iter(known))]

    def forecast(self, algorithm: str, sizes: Sequence[float]) -> tuple[float, float] | None:
        """The expected ratio and its uncertainty, a factor; `None` where no similar problem is known."""
        known = self._known.get(algorithm)
        if not known:
            return None
        logs = self._logs.get(algorithm)
        if logs is None:
            logs = self._logs[algorithm] = np.log(np.array(list(known)))
        distances = np.abs(logs - np.log(np.array(sizes, dtype=np.float64))).sum(axis=1)
        nearest = int(distances.argmin())
        distance = float(distances[nearest])
        if distance > math.log(MOST_UNCERTAINTY / LEAST_UNCERTAINTY):
            return None
        return list(known.values())[nearest], LEAST_UNCERTAINTY * math.exp(distance)
