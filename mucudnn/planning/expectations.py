"""The time that a launch is expected to take before it is timed, and the least that it may take."""

from __future__ import annotations

from collections.abc import Collection

from mucudnn.convolution.problem import Dim
from mucudnn.convolution.tile import extent
from mucudnn.optimizer import Forecast, Key
from mucudnn.planning.experience import Experience
from mucudnn.providers import STOCK, Estimating, Provider
from mucudnn.providers.provider import compute_dtype
from mucudnn.timing.measurement import Candidate, Measurement, middle

UNKNOWN, UNKNOWN_PARTS = (1.5, 50.0), (1.0, 1.5)
"""The forecast for an algorithm of which no similar launches are known, and for torch's own kernel on parts: the
seconds of the whole in units of that kernel's on the whole, and the factor within which they surely are."""

TYPICAL = 2.5
"""The expected time where operations and copies are known but no launches, in units of the least time for these: about
the median of 300 random layers on one core, both for matrix products and for transforms."""


class Expectations:
    """The expected times of one problem's launches."""

    def __init__(self, measurement: Measurement, experience: Experience) -> None:
        """
        Args:
            measurement: of the problem.
            experience: of this and other problems.
        """
        self._measurement, self._experience = measurement, experience
        self._problem, self._environment = measurement.problem, measurement.logbook.environment

    def forecast(self, algorithm: str, dim: Dim, stock_seconds: float, least: float = 0.0) -> Forecast:
        """Seconds of the whole in parts along a dim.

        Args:
            stock_seconds: of torch's own kernel on the whole.
            least: seconds that the operations and copies take at least; 0 where these are not known.
        """
        known, whole = self.known(algorithm, dim), extent(self._problem, dim)
        if known is not None:
            return Forecast(known.seconds * whole / -(-whole // 2), known.uncertainty)
        if least:
            return Forecast(TYPICAL * least, TYPICAL)
        ratio, uncertainty = UNKNOWN_PARTS if algorithm == STOCK else UNKNOWN
        return Forecast(ratio * stock_seconds, uncertainty)

    def in_parts(
        self, candidate: Candidate, dim: Dim, sizes: Collection[int], stock_seconds: float
    ) -> tuple[dict[int, float], Forecast]:
        """{size: seconds} that the whole takes at least in parts of the sizes, where that is known, and `forecast`."""
        provider, name = candidate
        whole, dtype, least, is_counted = extent(self._problem, dim), compute_dtype(self._problem), {}, False
        if isinstance(provider, Estimating):
            for size in sizes:
                effort = provider.effort(middle(self._problem, dim, size).problem, name, -(-whole // size))
                least[size] = self._measurement.device.least_seconds(*effort, dtype)
                is_counted = effort.operations > 0
        best = min(least.values(), default=0.0) if is_counted else 0.0
        return least, self.forecast(name, dim, stock_seconds, best)

    def known(self, algorithm: str, dim: Dim) -> Forecast | None:
        """The forecast for half of the whole from launches of other convolutions; `None` where too few are known."""
        part = middle(self._problem, dim, -(-extent(self._problem, dim) // 2)).problem
        return self._experience.forecast(self._environment, algorithm, part)

    def note(self, key: Key, seconds: float, provider: Provider | None) -> None:
        """Notes the time of a provider's launch for the forecasts of other problems, and for the device's speeds."""
        dim, algorithm, size = key
        part = middle(self._problem, Dim(dim), size).problem
        self._experience.note(self._environment, algorithm, part, seconds)
        if isinstance(provider, Estimating):
            effort = provider.effort(part, algorithm)
            self._measurement.device.took(seconds, *effort, compute_dtype(self._problem))
