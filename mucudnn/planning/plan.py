"""The plan of one problem: the division that computes it, and all timed launches for making another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mucudnn.convolution.problem import ConvProblem, Dim
from mucudnn.convolution.tile import divided_dims, extent
from mucudnn.optimizer import Division, Option, best_division, desirable_divisions, desirable_set
from mucudnn.providers import STOCK
from mucudnn.reporting.record import Record
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
