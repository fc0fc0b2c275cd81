"""The plan of one problem: the division that computes it, and all timed launches for making another one.

The launches of an exploration that has not settled are recorded, so that the next run goes on with their times.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mucudnn.convolution.problem import ConvProblem, Dim
from mucudnn.convolution.tile import divided_dims, extent
from mucudnn.optimizer import (
    Division,
    Exploration,
    Key,
    Launches,
    Option,
    best_division,
    desirable_divisions,
    desirable_set,
)
from mucudnn.providers import STOCK
from mucudnn.reporting.record import Record
from mucudnn.timing.measurement import Measurement, middle
from mucudnn.timing.schedule import LaunchError, Schedule

MARGIN = 0.05
"""A division replaces torch's own kernel only if, both run in turn, it takes less than 1 - MARGIN of its time."""

Options = Mapping[Dim, Sequence[Option]]


@dataclass(frozen=True)
class Plan:
    """How a problem is computed."""

    schedule: Schedule  # The launches; one of `STOCK` over the whole extent means torch's own kernel, untouched.
    record: Record
    """The plan for people. Its seconds are those that compare with torch's own kernel when both run in turn."""
    options: Options = field(repr=False)
    """All launches that are known beside torch's own kernel on the whole, from which another division can be made."""
    checks: bool = False  # Whether another division made of the options is to be checked before it is used.

    @property
    def problem(self) -> ConvProblem:
        """The convolution."""
        return self.schedule.problem

    @property
    def division(self) -> Division:
        """The algorithms and the sizes of the parts."""
        return self.schedule.division

    @cached_property
    def is_stock(self) -> bool:
        """Whether torch's own kernel serves the problem undivided."""
        return [option.algorithm for option in self.division.options] == [STOCK]

    def divided(self, division: Division) -> Plan:
        """The plan with another division, whose time is the sum of its launches' times."""
        parts = tuple((option.extent, option.algorithm) for option in division.options)
        fields = {"dim": str(division.dim), "seconds": division.seconds, "workspace": division.workspace}
        return replace(self.recorded(parts=parts, **fields), schedule=replace(self.schedule, division=division))

    def recorded(self, **changes: Any) -> Plan:
        """The plan with some fields of its record changed."""
        return replace(self, record=replace(self.record, **changes))

    def undivided(self) -> Plan:
        """The plan with torch's own kernel on the whole."""
        return self.divided(Division((self._stock(Dim.BATCH),)))

    def without(self, failed: LaunchError) -> Plan:
        """The next best plan once an algorithm has failed: without it at the failed extent and above. Torch's own
        kernel is what is left in the end, even beyond the limit."""
        options = dict(self.options)
        for dim in options if failed.extent == 0 else (Dim(self.division.dim),):
            left = options.get(dim, ())
            options[dim] = [o for o in left if o.algorithm != failed.algorithm or o.extent < failed.extent]
        every = (
            best_division((*options.get(dim, ()), self._stock(dim)), self._extent(dim), self.record.limit, dim)
            for dim in divided_dims(self.problem)
        )
        fitting = (division for division in every if division is not None)
        best = min(fitting, key=lambda division: division.seconds, default=self.undivided().division)
        return replace(self, options=options).divided(best)

    def desirable(self) -> list[Division]:
        """The divisions that no other beats in time and workspace, torch's own kernel being the first of them."""
        worthwhile = (1 - MARGIN) * self.record.stock_seconds
        fast = [
            division
            for dim in divided_dims(self.problem)
            for division in desirable_divisions((*self.options.get(dim, ()), self._stock(dim)), self._extent(dim), dim)
            if division.seconds <= worthwhile and division.workspace <= self.record.limit
        ]
        return [Division((self._stock(Dim.BATCH),)), *desirable_set(fast)]

    def _stock(self, dim: Dim) -> Option:
        return Option(self._extent(dim), STOCK, self.record.stock_seconds, self.record.stock_workspace or 0)

    def _extent(self, dim: Dim) -> int:
        return extent(self.problem, dim)


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
