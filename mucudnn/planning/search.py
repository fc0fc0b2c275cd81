"""Search: which launches of a problem are timed, in which order, and which are pruned because they cannot win."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from mucudnn.convolution.problem import ConvProblem, Dim
from mucudnn.convolution.tile import extent
from mucudnn.optimizer import Costs, Forecast, Option
from mucudnn.planning.candidate_sizes import Sizes
from mucudnn.planning.offers import Offers
from mucudnn.planning.plan import MARGIN
from mucudnn.providers import STOCK
from mucudnn.timing.environment import Environment
from mucudnn.timing.measurement import Candidate, Measurement, middle
from mucudnn.timing.store import Store
from mucudnn.timing.survey import Task

PARTS_MARGIN = 0.15
"""As `MARGIN`, for a division whose parts all use torch's own kernel. The parts compute in the same way as the whole,
so a small gain may only mean that caches and allocator were in a better state when the parts were timed."""

ONCE, ONCE_IF_LONG, LONG = 1.7, 1.25, 0.005
"""A launch is timed once only if its first call takes more than so many times the time at which it could win. The
warm-up within a first call takes less than that, above all where a call takes more than `LONG` seconds."""

WARM_UP_SECONDS = 0.025
"""As long as no launch of an algorithm is known, its first call is repeated if it takes fewer seconds: its warm-up,
such as loading a library, may take ten times as long as the call's own work."""

MOST_TIMES_STOCK = 1.3
"""Other parts are pruned if the parts that are timed first take more than so many times torch's time per sample."""

BETWEEN = 1.1
"""Once the promising powers of two are timed, a part is taken to be at most so many times as fast per sample as the
faster of its two timed neighbours in size."""

PATIENCE, CALLS = 20.0, 2
"""Timing parts beyond the first ones may take, for all algorithms of a problem together, so many times the time of
torch's own kernel on the whole. As a rule a part is called `CALLS` times."""

LEAST_TRIED, ODD = 3, 2.0
"""Until times of so many convolutions are known for an algorithm, its first size is timed if it could win when `ODD`
times as fast as these times predict: one outlier must not prune the algorithm everywhere."""

UNCERTAIN = 10.0
"""An algorithm's first size is always timed if its forecast is more uncertain than this factor: such a forecast
extrapolates far beyond the timed launches, such as from kernels of 3x3 to one of 31x31."""

PROBE_SECONDS = 0.25

SHARE = 4
"""The first part that is timed is no larger than the smallest size of at least 1/SHARE of the whole."""


class Search:
    """The launches of one problem that are worth timing.

    Torch's own kernel on the whole is always timed. Of the others, those with the smallest lower bounds come first. A
    launch is pruned if the times of similar launches make it nearly sure that no division with it beats torch's own
    kernel by the margin. Where that kernel fits any limit, as its scratch memory does not count, this holds within any.
    """

    def __init__(
        self, measurement: Measurement, costs: Costs, allowed: float, policy: str, takes_any: bool = False
    ) -> None:
        """
        Args:
            costs: the cost model; newly timed launches are added.
            allowed: bytes of workspace.
            policy: which sizes of parts are tried.
            takes_any: whether whatever fits may win, since torch's own kernel does not.
        """
        self._takes_any = takes_any
        self._measurement, self._costs = measurement, costs
        self._problem, self._allowed, self._policy = measurement.problem, allowed, policy
        self._group = measurement.problem.with_extent(1)
        self._stock_seconds = measurement.stock_seconds()
        self._spent = 0.0
        self._add(STOCK, middle(self._problem, Dim.BATCH, self._problem.extent).problem, self._stock_seconds)

    def rounds(
        self, offers: Offers, sizes: Mapping[str, Sequence[int]] | None, found: Mapping[Task, Sequence[Option]]
    ) -> Iterator[dict[Task, Candidate]]:
        """What is tried, round by round.

        Args:
            sizes: that an earlier search came to; `None` if there was none.
            found: what was measured in the rounds so far.
        """
        yield offers.within(self._measurement, self._allowed)

    def lower_bound(self, candidate: Candidate, dim: Dim) -> float:
        """The least seconds that the whole may take by a candidate; 0 where no similar launch is known."""
        part = middle(self._problem, dim, max(1, extent(self._problem, dim) // 2))
        forecast = self._forecast(candidate[1], part.problem)
        return 0.0 if forecast is None else forecast.least * extent(self._problem, dim) / part.extent

    def options(self, candidate: Candidate, dim: Dim) -> Iterator[Option]:
        """The candidate's launches along a dim: those that are known, then those that are worth timing."""
        sizes = Sizes(self._measurement, candidate, dim, self._allowed, self._policy)
        if sizes.smallest is None:
            return
        known = [size for size in sizes.all if self._measurement.is_known(candidate, dim, size)]
        left = set(sizes.all).difference(known)
        seen: dict[int, float] = {}
        for noted in filter(sizes.fits, known):
            for option in self._timed(candidate, dim, noted):
                seen[noted] = option.seconds
                yield option
        probes = list(self._probes(sizes, dim))
        while (size := self._next(candidate, dim, left, (probes, sizes.few, sizes.all), seen)) is not None:
            left.remove(size)
            if sizes.fits(size):
                for option in self._timed(candidate, dim, size):
                    seen[size] = option.seconds
                    self._spent += 0.0 if size in probes else CALLS * option.seconds
                    yield option

    def _next(
        self,
        candidate: Candidate,
        dim: Dim,
        left: set[int],
        stages: Sequence[Sequence[int]],
        seen: Mapping[int, float],
    ) -> int | None:
        """The size to time next, from the first stage with a size that may win; the first stage keeps its order.

        Args:
            left: sizes that were not timed; those that cannot win are removed.
            stages: the sizes of each stage.
            seen: {timed size: seconds}.
        """
        bar = self._bar(candidate[1])
        for number, stage in enumerate(stages):
            if number and not (self._is_promising(seen, dim) and self._spent <= PATIENCE * self._stock_seconds):
                return None
            bounds: dict[int, float] = {}
            for size in filter(left.__contains__, stage):
                if number < 2 or _between(size, seen) < bar * self._share(dim, size):
                    bounds[size] = self._lower_bound(candidate, dim, size, number == 0 and size == stage[0])
            left.difference_update(size for size, seconds in bounds.items() if seconds == math.inf)
            wanted = [size for size in bounds if size in left]
            if wanted:
                return wanted[0] if number == 0 else min(wanted, key=lambda size: (bounds[size], -size))
        return None

    def chosen(self, candidate: Candidate, dim: Dim, sizes: Iterable[int]) -> Iterator[Option]:
        """The candidate's launches of sizes that an earlier search has chosen."""
        fitting = Sizes(self._measurement, candidate, dim, self._allowed, self._policy)
        for size in sizes:
            if fitting.fits(size):
                yield from self._timed(candidate, dim, size)

    def _probes(self, sizes: Sizes, dim: Dim) -> Iterator[int]:
        """The sizes that are timed first: about 1/SHARE of the whole, less where that takes long, and the smallest."""
        whole = extent(self._problem, dim)
        enough = next((size for size in sizes.few if size * SHARE >= whole), whole)
        yield (
            sizes.largest(lambda size: size <= enough and self._share(dim, size) <= PROBE_SECONDS)
            or sizes.smallest
            or whole
        )
        if dim is Dim.BATCH and sizes.smallest is not None:
            yield sizes.smallest

    def _timed(self, candidate: Candidate, dim: Dim, size: int) -> Iterator[Option]:
        share, is_new = self._share(dim, size), not self._measurement.is_known(candidate, dim, size)
        most = self._bar(candidate[1]) * share
        abandon = (ONCE_IF_LONG if most > LONG else ONCE) * most
        part = middle(self._problem, dim, size).problem
        if self._groups(candidate[1], part, 1) == 0:
            abandon = max(abandon, WARM_UP_SECONDS)
        option = self._measurement.option(candidate, dim, size, abandon, most)
        if option is not None:
            if is_new:
                self._add(candidate[1], part, option.seconds)
            yield option

    def _lower_bound(self, candidate: Candidate, dim: Dim, size: int, is_first: bool) -> float:
        """The least seconds that the whole may take in parts of a size; infinite if such parts cannot win.

        Args:
            is_first: whether this is the first size; it is timed all the same where few similar launches are known.
        """
        part = middle(self._problem, dim, size).problem
        forecast = self._forecast(candidate[1], part)
        if forecast is None:
            return 0.0
        least = forecast.least * extent(self._problem, dim) / size
        bar = self._bar(candidate[1]) * self._stock_seconds
        # Torch's own kernel is noted on the whole of each convolution.
        enough = 2 if candidate[1] == STOCK else 1
        if is_first and forecast.uncertainty > UNCERTAIN:
            return least
        if is_first and least < ODD * bar and self._groups(candidate[1], part, enough) < LEAST_TRIED:
            return least
        return least if least < bar else math.inf

    def _groups(self, algorithm: str, part: ConvProblem, least: int) -> int:
        """The number of convolutions with at least so many known launches of the kind."""
        return self._costs.groups(kind_of(algorithm, part, self._measurement.logbook.environment), least)

    def _is_promising(self, seen: Mapping[int, float], dim: Dim) -> bool:
        return self._takes_any or any(
            seconds <= MOST_TIMES_STOCK * self._share(dim, size) for size, seconds in seen.items()
        )

    def _share(self, dim: Dim, size: int) -> float:
        """Seconds of torch's own kernel on the whole, scaled down to a part of this size."""
        return self._stock_seconds * size / extent(self._problem, dim)

    def _bar(self, algorithm: str) -> float:
        """The time below which parts may form a winning division, in units of torch's own kernel."""
        if self._takes_any:
            return math.inf
        return 1 - (PARTS_MARGIN if algorithm == STOCK else MARGIN)

    def _forecast(self, algorithm: str, part: ConvProblem) -> Forecast | None:
        environment = self._measurement.logbook.environment
        return self._costs.forecast(kind_of(algorithm, part, environment), self._group, sizes_of(part))

    def _add(self, algorithm: str, part: ConvProblem, seconds: float) -> None:
        kind = kind_of(algorithm, part, self._measurement.logbook.environment)
        self._costs.add(kind, self._group, sizes_of(part), seconds)


def _between(size: int, seen: Mapping[int, float]) -> float:
    """The least seconds that a part may take, from the timed sizes next to it."""
    below = max((other for other in seen if other < size), default=None)
    above = min((other for other in seen if other > size), default=None)
    rates = [seen[other] / other for other in (below, above) if other is not None]
    return size * min(rates) / BETWEEN if rates else 0.0


def costs_on_record(store: Store, environment: Environment) -> Costs:
    """The cost model of the launches that a database holds for an environment."""
    costs, here = Costs(), environment.launch_key()
    for key, options in store.contents():
        if all(key[name] == value for name, value in here.items()):
            for option in options:
                if not option.algorithm.startswith("division "):
                    part = ConvProblem.from_launch_key(key, option.extent)
                    kind = kind_of(option.algorithm, part, environment)
                    costs.add(kind, part.with_extent(1), sizes_of(part), option.seconds)
    return costs


def kind_of(algorithm: str, part: ConvProblem, environment: Environment) -> Hashable:
    """The properties of a launch on which its time does not depend smoothly: one cost model for each combination."""
    dense = tuple(name == "channels_last" for name in part.formats)
    return algorithm, part.direction, part.dims, part.transposed, part.dtype, dense, environment


def sizes_of(part: ConvProblem) -> tuple[float, ...]:
    """The numbers on which a launch's time depends smoothly: operations, elements, and what these are made of."""
    places, taps = math.prod(part.y_shape[2:]), math.prod(part.w_shape[2:])
    elements = sum(map(math.prod, (part.x_shape, part.w_shape, part.y_shape)))
    rows = math.e if "strided" in part.formats else 1.0
    channels, filters = part.x_shape[1] / part.groups, part.y_shape[1] / part.groups
    sizes = (elements, part.extent, channels, filters, places, taps, math.prod(part.stride), part.groups, rows)
    return part.flops, *(float(size) for size in sizes)
