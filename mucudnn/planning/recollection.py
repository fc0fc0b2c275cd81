"""Records the launches of an exploration that has not settled, so that the next run goes on with their times."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property

from mucudnn.convolution.problem import Dim
from mucudnn.convolution.tile import divided_dims
from mucudnn.optimizer import Exploration, Key, Launches, Option
from mucudnn.providers import STOCK
from mucudnn.timing.measurement import Measurement, middle


class Recollection:
    """The times on record of the launches of one problem.

    Times count in units of torch's own kernel on the whole, since the speed of a machine changes from run to run.
    """

    def __init__(self, measurement: Measurement, assumed: float | None = None) -> None:
        """
        Args:
            measurement: of the problem.
            assumed: seconds of torch's own kernel on the whole, where it is never called.
        """
        self._measurement, self._problem, self._assumed = measurement, measurement.problem, assumed
        self._unit: float | None = None

    @cached_property
    def stock_seconds(self) -> float | None:
        """Seconds of torch's own kernel on the whole, as an earlier run has recorded them; `None` for none."""
        if self._assumed is not None:
            return self._assumed
        row = self._measurement.logbook.launches(self._problem).get((STOCK, self._problem.extent))
        return row.seconds if row is not None and not row.workspace and row.seconds > 0 else None

    @cached_property
    def best(self) -> float:
        """The least time on record of the whole in one launch, in units of torch's own kernel; 1 for nothing less."""
        rows = self._measurement.logbook.launches(self._problem).items()
        wholes = (option.seconds for (_, extent), option in rows if extent == self._problem.extent)
        return 1.0 if self.stock_seconds is None else min(wholes, default=math.inf) / self.stock_seconds

    def ratios(self, launches: Launches) -> dict[Key, float]:
        """The times on record of launches not timed in this run, in units of torch's own kernel on the whole."""
        found: dict[Key, float] = {}
        if self.stock_seconds is None:
            return found
        rows: dict[tuple[str, int], Mapping[tuple[str, int], Option]] = {}
        for variant in launches.variants:
            for size in variant.workspaces:
                part = middle(self._problem, Dim(variant.dim), size).problem
                # Micro-batches of all sizes are recorded together.
                place = variant.dim, 0 if variant.dim == Dim.BATCH else size
                if place not in rows:
                    rows[place] = self._measurement.logbook.launches(part)
                row, key = rows[place].get((variant.algorithm, part.extent)), (variant.dim, variant.algorithm, size)
                if row is not None and key not in launches.seconds:
                    found[key] = row.seconds / self.stock_seconds
        return found

    def keep(self, exploration: Exploration, keys: Collection[Key]) -> None:
        """Writes launches that were timed now, in proportion to the time of torch's own kernel on record."""
        if self._unit is None:
            self._unit = self.stock_seconds
        if self._unit is None:
            self._unit = exploration.baseline_seconds
            self.keep_stock(self._unit)
        scale = self._unit / exploration.baseline_seconds
        for dim in divided_dims(self._problem):
            for option in exploration.launches.options(dim):
                if (dim, option.algorithm, option.extent) in keys:
                    self._measurement.adopt(dim, replace(option, seconds=option.seconds * scale))

    def keep_stock(self, seconds: float) -> None:
        """Writes the time of torch's own kernel on the whole."""
        self._measurement.logbook.record_later(self._problem, Option(self._problem.extent, STOCK, seconds, 0))
