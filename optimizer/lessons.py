"""Lessons: what an algorithm is expected to take for a problem, from what it took for similar ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEAST_DOUBT = 2.0
"""The factor within which a forecast holds for a problem of the very same sizes."""

MOST_DOUBT = 10.0
"""Problems whose doubt would be larger are not similar: nothing is forecast from one to the other."""

MOST_PROBLEMS = 1024
"""So many problems are known of each algorithm, those that came last: a forecast looks at all of them."""

Sizes = tuple[float, ...]
"""What a problem's time depends on, all positive: flops, channels, and the like. Always as many, in one order."""


class Lessons:
    """Times of algorithms in units of the baseline's for the same problem, by the sizes of the problem.

    A forecast is that of the most similar problem. Problems are as different as the logarithms of their sizes, which
    are added up; with every unit of it the doubt grows by the factor e.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[Sizes, float]] = {}
        self._logs: dict[str, npt.NDArray[np.float64]] = {}  # of the sizes, a row each, in the order of `_known`

    def add(self, algorithm: str, sizes: Sequence[float], ratio: float) -> None:
        """Notes what an algorithm took, in units of the baseline."""
        known = self._known.setdefault(algorithm, {})
        if tuple(sizes) not in known:
            self._logs.pop(algorithm, None)
        known[tuple(sizes)] = ratio
        if len(known) > MOST_PROBLEMS:
            del known[next(iter(known))]

    def forecast(self, algorithm: str, sizes: Sequence[float]) -> tuple[float, float] | None:
        """The ratio that is expected and the doubt, a factor; `None` where no similar problem is known."""
        known = self._known.get(algorithm)
        if not known:
            return None
        logs = self._logs.get(algorithm)
        if logs is None:
            logs = self._logs[algorithm] = np.log(np.array(list(known)))
        distances = np.abs(logs - np.log(np.array(sizes, dtype=np.float64))).sum(axis=1)
        nearest = int(distances.argmin())
        distance = float(distances[nearest])
        if distance > math.log(MOST_DOUBT / LEAST_DOUBT):
            return None
        return list(known.values())[nearest], LEAST_DOUBT * math.exp(distance)
