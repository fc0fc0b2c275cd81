"""The time that a launch is expected to take before it is timed, by launches of other convolutions, and the least."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Hashable
from functools import cached_property

from mucudnn.convolution.problem import ConvProblem, Dim, Shape
from mucudnn.convolution.tile import extent
from mucudnn.optimizer import Costs, Forecast, Key
from mucudnn.process import renewed
from mucudnn.providers import STOCK, Provider
from mucudnn.providers.provider import compute_dtype
from mucudnn.timing.logbook import Environment, settlements
from mucudnn.timing.measurement import Candidate, Measurement, middle
from mucudnn.timing.store import Store

LEAST_TRIED, ODD = 3, 2.0
"""Until times of so many convolutions are known for an algorithm, a forecast is more uncertain by the factor `ODD`: one
outlier must not rule out the algorithm everywhere."""

UNCERTAIN = 10.0
"""A forecast that is more uncertain than this factor is none: it extrapolates far beyond the timed launches, such as
from kernels of 3x3 to one of 31x31."""


class Experience:
    """The known times of launches, from earlier runs and from this one, for all threads."""

    def __init__(self, store: Store) -> None:
        """``store``: of what earlier runs have found."""
        self._store = store
        self._costs: dict[Environment, Costs] = {}
        self._lock = renewed(threading.RLock())

    @cached_property
    def shapes(self) -> frozenset[tuple[str, Shape, Shape]]:
        """Directions and shapes of input and weight for which a plan, or times of launches, may be on record."""
        plans = ((key, terms["extent"]) for key, terms, values in settlements(self._store) if "parts" in values)
        wholes = (
            (key, option.extent)
            for key, options in self._store.contents()
            for option in options
            if option.algorithm == STOCK and not option.workspace
        )
        problems = (ConvProblem.from_launch_key(key, extent) for key, extent in (*plans, *wholes))
        return frozenset((str(problem.direction), problem.input_shape, problem.w_shape) for problem in problems)

    def note(self, environment: Environment, algorithm: str, part: ConvProblem, seconds: float) -> None:
        """Notes the time of a launch. ``part``: what it computed."""
        with self._lock:
            self._known(environment).add(_kind(algorithm, part), part.with_extent(1), _sizes(part), seconds)

    def forecast(self, environment: Environment, algorithm: str, part: ConvProblem) -> Forecast | None:
        """The expected time of a launch; `None` where too little is known."""
        kind = _kind(algorithm, part)
        with self._lock:
            costs = self._known(environment)
            found = costs.forecast(kind, part.with_extent(1), _sizes(part))
            if found is None or found.uncertainty > UNCERTAIN:
                return None
            # Torch's own kernel is noted on the whole of each convolution: on parts it is tried where two are known.
            is_tried = costs.groups(kind, 2 if algorithm == STOCK else 1) >= LEAST_TRIED
            return found if is_tried else found._replace(uncertainty=ODD * found.uncertainty)

    def _known(self, environment: Environment) -> Costs:
        """The cost model of an environment, at first fitted to the times in the database."""
        if environment not in self._costs:
            costs = self._costs[environment] = Costs()
            here = environment.launch_key()
            for key, options in self._store.contents():
                if all(key[name] == value for name, value in here.items()):
                    for option in options:
                        if not option.algorithm.startswith("division "):
                            part = ConvProblem.from_launch_key(key, option.extent)
                            kind = _kind(option.algorithm, part)
                            costs.add(kind, part.with_extent(1), _sizes(part), option.seconds)
        return self._costs[environment]


def _kind(algorithm: str, part: ConvProblem) -> Hashable:
    """The properties of a launch on which its time does not depend smoothly: one cost model for each combination."""
    dense = tuple(name == "channels_last" for name in part.formats)
    return algorithm, part.direction, part.dims, part.transposed, part.dtype, dense


def _sizes(part: ConvProblem) -> tuple[float, ...]:
    """The numbers on which a launch's time depends smoothly: operations, elements, and what these are made of."""
    places, taps = math.prod(part.y_shape[2:]), math.prod(part.w_shape[2:])
    elements = sum(map(math.prod, (part.x_shape, part.w_shape, part.y_shape)))
    rows = math.e if "strided" in part.formats else 1.0
    channels, filters = part.x_shape[1] / part.groups, part.y_shape[1] / part.groups
    sizes = (elements, part.extent, channels, filters, places, taps, math.prod(part.stride), part.groups, rows)
    return part.flops, *(float(size) for size in sizes)


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
        for size in sizes:
            effort = provider.effort(middle(self._problem, dim, size).problem, name, -(-whole // size))
            if effort is None:
                break
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
        effort = None if provider is None else provider.effort(part, algorithm)
        if effort is not None:
            self._measurement.device.took(seconds, *effort, compute_dtype(self._problem))
