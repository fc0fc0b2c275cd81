"""Plan: how one problem is computed, and the alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mucudnn.convolution.problem import ConvProblem, Dim
from mucudnn.convolution.tile import dims, extent
from mucudnn.optimizer import Division, Option, best_division, desirable_divisions, desirable_set
from mucudnn.providers import STOCK
from mucudnn.reporting.record import Record
from mucudnn.timing.schedule import LaunchError, Schedule

MARGIN = 0.05
"""A division replaces torch's own kernel only if, both run in turn, it takes less than 1 - MARGIN of its time."""

Options = Mapping[Dim, Sequence[Option]]


@dataclass(frozen=True)
class Plan:
    """How a problem is computed.

    Attributes:
        schedule: the launches; one of `STOCK` over the whole extent means torch's own kernel, untouched.
        limit: bytes of workspace that were allowed.
        options: all launches that are known beside torch's own kernel on the whole, from which another division can be
            made.
        seconds: of the division, as it compares with torch's own kernel when both run in turn.
        undivided_seconds: of the best algorithm that fits and takes the whole at once, compared alike.
        stock_seconds: of torch's own kernel on the whole.
        whole_workspace: bytes that the division's algorithms, other than torch's own, would need undivided.
        trials: calls of the program that tried something, where planning is live.
        cost: seconds that these took more than torch's own kernel would have.
        tries: algorithms, and how many of these calls tried each.
        leader: of what was tried so far, as `Record` has it; `None` where nothing is tried any more.
        leader_seconds: what that takes.
        wrong: algorithms whose results were wrong, torch's own kernel perhaps among them, and what was wrong.
        checks: whether another division made of the options is to be checked before it is used.
        stock_workspace: bytes that torch's own kernel holds for itself on the whole; `None` where that is not counted,
            so that it fits any limit.
    """

    schedule: Schedule
    limit: float
    options: Options
    seconds: float
    undivided_seconds: float
    stock_seconds: float
    whole_workspace: int = 0
    trials: int = 0
    cost: float = 0.0
    tries: tuple[tuple[str, int], ...] = ()
    leader: str | None = None
    leader_seconds: float = 0.0
    wrong: tuple[tuple[str, str], ...] = ()
    checks: bool = False
    stock_workspace: int | None = None

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

    @property
    def is_over(self) -> bool:
        """Whether the division exceeds the limit, as torch's own kernel may where that counts."""
        return self.division.workspace > self.limit

    @property
    def record(self) -> Record:
        """The plan for people."""
        return Record(
            problem=self.problem,
            direction=str(self.problem.direction),
            limit=self.limit,
            parts=tuple((option.extent, option.algorithm) for option in self.division.options),
            seconds=self.seconds,
            undivided_seconds=self.undivided_seconds,
            stock_seconds=self.stock_seconds,
            workspace=self.division.workspace,
            dim=str(self.division.dim),
            whole_workspace=self.whole_workspace,
            trials=self.trials,
            cost=self.cost,
            tries=self.tries,
            leader=self.leader,
            leader_seconds=self.leader_seconds,
            wrong=self.wrong,
            stock_workspace=self.stock_workspace,
        )

    def divided(self, division: Division) -> Plan:
        """The plan with another division, at the time that the launches of that one add up to."""
        return replace(self, schedule=replace(self.schedule, division=division), seconds=division.seconds)

    def undivided(self) -> Plan:
        """The plan with torch's own kernel on the whole."""
        return self.divided(Division((self._stock(Dim.BATCH),)))

    def without(self, failed: LaunchError) -> Plan:
        """The next best plan once an algorithm has failed: without it at the failed extent and above."""
        options = dict(self.options)
        for dim in options if failed.extent == 0 else (Dim(self.division.dim),):
            left = options.get(dim, ())
            options[dim] = [o for o in left if o.algorithm != failed.algorithm or o.extent < failed.extent]
        return replace(self, options=options).divided(self.best(options))

    def best(self, options: Options) -> Division:
        """The fastest division within the limit, along whichever dim, torch's own kernel on the whole among the
        choices; that, too, where nothing fits.
        """
        every = (
            best_division((*options.get(dim, ()), self._stock(dim)), self._extent(dim), self.limit, dim)
            for dim in dims(self.problem)
        )
        found = (division for division in every if division is not None)
        return min(found, key=lambda division: division.seconds, default=self.undivided().division)

    def desirable(self) -> list[Division]:
        """The divisions that no other beats in time and workspace, torch's own kernel being the first of them."""
        worthwhile = (1 - MARGIN) * self.stock_seconds
        fast = [
            division
            for dim in dims(self.problem)
            for division in desirable_divisions((*self.options.get(dim, ()), self._stock(dim)), self._extent(dim), dim)
            if division.seconds <= worthwhile and division.workspace <= self.limit
        ]
        return [Division((self._stock(Dim.BATCH),)), *desirable_set(fast)]

    def _stock(self, dim: Dim) -> Option:
        return Option(self._extent(dim), STOCK, self.stock_seconds, self.stock_workspace or 0)

    def _extent(self, dim: Dim) -> int:
        return extent(self.problem, dim)
