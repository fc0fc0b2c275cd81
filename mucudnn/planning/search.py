"""Chooses the trials of one problem within one limit, makes a plan of the best division, and records it.

Live planning makes these trials in calls of the program, and planning ahead makes them before the first call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

from mucudnn.convolution.problem import ConvProblem, Dim
from mucudnn.convolution.tile import divided_dims, extent
from mucudnn.optimizer import Division, Exploration, Key, Option, OverheadBudget, Settled, Variant
from mucudnn.planning.experience import Expectations, Experience
from mucudnn.planning.offers import AffordableParts, Offers, Task, fitting_sizes, workspace_of_sizes
from mucudnn.planning.plan import MARGIN, Plan, Recollection
from mucudnn.providers import STOCK, Provider
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.provider import Effort, compute_dtype
from mucudnn.reporting.record import Record
from mucudnn.settings import Settings
from mucudnn.timing.measurement import Candidate, Measurement
from mucudnn.timing.schedule import Schedule

LEAST_SECONDS = 1e-4
"""Convolutions that torch's own kernel computes faster are left to it: a call from Python costs about as much."""

PARTS_MARGIN = 0.15
"""The same as `MARGIN`, for a division whose parts all use torch's own kernel. They compute in the same way as the
whole, so a small gain may only mean that caches and allocator were in a better state when the parts were timed."""

_SECONDS = ("seconds", "undivided_seconds", "stock_seconds")  # The fields of a plan's record that the database keeps.


@dataclass(frozen=True)
class Search:
    """One problem within one limit."""

    measurement: Measurement  # The known times and workspaces of the problem.
    limit: float  # Bytes of workspace.
    settings: Settings  # The user's settings.
    offers: Offers  # The algorithms of the problem's device.
    experience: Experience  # Times of other problems.
    stock_workspace: int | None = None  # Bytes of torch's own kernel on the whole, where they count.
    tries_compiled: bool = False  # Whether engines that cuDNN compiles are tried though nothing is known of them.
    avoids_stock: bool = False
    """Whether torch's own kernel is never called on the whole, as it is known to exceed the limit."""

    @property
    def problem(self) -> ConvProblem:
        """The convolution."""
        return self.measurement.problem

    @property
    def stock_fits(self) -> bool:
        """Whether torch's own kernel on the whole keeps the limit."""
        return (self.stock_workspace or 0) <= self.limit

    @cached_property
    def assumed_seconds(self) -> float | None:
        """The assumed time of torch's own kernel if it is never called, from its operations and columns."""
        if not self.avoids_stock:
            return None
        effort = Effort.of(self.problem.flops, self.stock_workspace or 0)
        return self.measurement.device.least_seconds(*effort, compute_dtype(self.problem))

    @property
    def terms(self) -> dict[str, Any]:
        """The settings on which the plan depends, besides the environment and the problem of any number of samples."""
        settings = self.settings
        terms = {"extent": self.problem.extent, "limit": str(self.limit), "policy": settings.policy}
        total = settings.total_workspace_size is not None
        return {**terms, "engines": settings.engines, "check": settings.check, "total": total}

    def is_too_short(self, seconds: float) -> bool:
        """Whether a convolution is left to torch's own kernel, which takes so many seconds."""
        return self.stock_fits and is_too_short(seconds)

    def exploration(
        self,
        seconds: Sequence[float],
        overhead: OverheadBudget,
        launches: dict[Key, list[float]] | None = None,
        is_live: bool = True,
    ) -> Exploration:
        """The exploration of all that may be tried.

        Args:
            seconds: measured times of torch's own kernel on the whole.
            launches: times of the problem's launches, shared with its explorations within other limits.
            is_live: whether calls of the program are the trials, so that large parts and warm-ups cost little, and a
                fast algorithm that computes the whole soon checks the others. The caller has then measured speeds.
        """
        if not self.avoids_stock:
            self.note((str(Dim.BATCH), STOCK, self.problem.extent), min(seconds))
        if not is_live:
            self.measurement.device.measure_speeds(compute_dtype(self.problem))
        margins = (MARGIN, PARTS_MARGIN)
        if not self.stock_fits:
            margins = (-math.inf, -math.inf)
        warm_ups = int(is_live and self.measurement.device.is_asynchronous)
        given = self._variants(min(seconds)), overhead, margins, warm_ups, launches
        # Within a total the limit is a share of it; measurements without a limit must be valid for every limit.
        any_gain = not is_live and (self.limit == math.inf or self.settings.total_workspace_size is not None)
        exploration = Exploration(STOCK, seconds, *given, not is_live, any_gain, not self.avoids_stock)
        if is_live:
            exploration.adopt(self.recollection.ratios(exploration.launches))
        return exploration

    @cached_property
    def recollection(self) -> Recollection:
        """The times on record of the problem's launches."""
        return Recollection(self.measurement, self.assumed_seconds)

    def _variants(self, stock_seconds: float) -> list[Variant]:
        """The algorithms to try, with their sizes. Those that cannot win by their times for similar problems are left
        out, before their workspaces are queried, which takes most of the time of preparing an exploration."""
        problem, measurement, policy = self.problem, self.measurement, self.settings.policy
        allowed = min(self.limit, measurement.device.memory // 2)

        def may_win(candidate: Candidate) -> bool:
            return self._may_win(candidate, stock_seconds)

        affordable: Mapping[Task, dict[int, int]] = {}
        if self.offers.are_plans_costly:
            parts = AffordableParts(self.offers, measurement, allowed, policy, may_win)
            offered, affordable = parts.offered, parts.fitting
        else:
            offered = self.offers.within(measurement, allowed)
        found: list[Variant] = []
        for dim in divided_dims(problem):
            whole = extent(problem, dim)
            others: list[Variant] = []
            # Torch's own kernel comes last: it computes the rest of the whole beside parts of the others.
            along = [one for (place, _), one in offered.items() if place is dim]
            for candidate in sorted(along, key=lambda one: one[1] == STOCK):
                name, is_stock = candidate[1], candidate[1] == STOCK
                if not may_win(candidate) and not (is_stock and others and STOCK not in self._wrong):
                    continue
                sizes, rests = affordable.get((dim, name)), dict[int, int]()
                if sizes is None:
                    sizes = fitting_sizes(measurement, candidate, dim, allowed, policy)
                    left = {whole - size for variant in others for size in variant.workspaces} - {0}
                    rests = workspace_of_sizes(measurement, candidate, dim, allowed, left) if is_stock else rests
                least, forecast = self._expected.in_parts(candidate, dim, sizes, stock_seconds)
                if not self.stock_fits or min(least.values(), default=0.0) < (1 - MARGIN) * stock_seconds:
                    others.append(Variant(dim, name, whole, sizes, *forecast, rests, least))
            found += others
        return found

    def _may_win(self, candidate: Candidate, stock_seconds: float) -> bool:
        """Whether an algorithm may win by the times of launches like its own; what cuDNN compiles needs such times."""
        name = candidate[1]
        if name in self._wrong or (not self.tries_compiled and self._is_left_out(candidate)):
            return False
        expected, uncertainty = self._expected.forecast(name, Dim.BATCH, stock_seconds)
        margin = PARTS_MARGIN if name == STOCK else MARGIN
        return not self.stock_fits or expected / uncertainty < (1 - margin) * stock_seconds

    def with_compiled(self) -> Search | None:
        """The search that also tries the engines that this one leaves out, if there are any."""
        candidates = self.offers.candidates(self.problem, Dim.BATCH)
        is_wider = not self.tries_compiled and any(map(self._is_left_out, candidates))
        return replace(self, tries_compiled=True) if is_wider else None

    def _is_left_out(self, candidate: Candidate) -> bool:
        """Whether a plan of an engine is compiled, which takes long, and nothing is known of the engine."""
        provider, name = candidate
        is_compiled = isinstance(provider, Engines) and provider.is_compiled(self.problem, name)
        return is_compiled and self._expected.known(name, Dim.BATCH) is None

    @property
    def _wrong(self) -> Mapping[str, str]:
        return self.measurement.logbook.wrong(self.problem) if self.settings.check else {}

    def note(self, key: Key, seconds: float) -> None:
        """Notes the time of a launch, for the forecasts of other problems, too."""
        self._expected.note(key, seconds, self.providers.get(key[1]))

    @cached_property
    def _expected(self) -> Expectations:
        return Expectations(self.measurement, self.experience)

    @cached_property
    def providers(self) -> dict[str, Provider]:
        """The providers that serve the problem or parts of it, by algorithm."""
        return self.offers.providers(self.problem)

    def stock(self, seconds: float) -> Plan:
        """Torch's own kernel as the plan."""
        problem, workspace, same = self.problem, self.stock_workspace, (seconds,) * 3
        whole, parts = Option(problem.extent, STOCK, seconds, workspace or 0), ((problem.extent, STOCK),)
        wrong = tuple(self.measurement.logbook.wrong(problem).items())
        given = problem, str(problem.direction), self.limit, parts, *same, whole.workspace
        record = Record(*given, wrong=wrong, stock_workspace=workspace, is_stock_assumed=self.avoids_stock)
        return Plan(Schedule(problem, Division((whole,)), self.providers), record, {}, self.settings.check)

    def so_far(self, exploration: Exploration) -> Plan:
        """Torch's own kernel, and what was tried beside it."""
        tries, (leader, seconds) = tuple(sorted(exploration.tries.items())), exploration.leader()
        tried = {"trials": exploration.tried, "cost": exploration.lost, "tries": tries, "spread": exploration.spread}
        return self.stock(exploration.baseline_seconds).recorded(**tried, leader=leader, leader_seconds=seconds)

    def found(self, exploration: Exploration, settled: Settled) -> Plan:
        """The plan that the exploration has settled on, with all known launches."""
        options = {dim: exploration.launches.options(dim) for dim in divided_dims(self.problem)}
        plan = replace(self.so_far(exploration).recorded(leader=None, leader_seconds=0.0), options=options)
        if settled.division is not None:
            plan = plan.divided(settled.division)
            times = {"seconds": settled.seconds, "undivided_seconds": settled.undivided_seconds}
            plan = plan.recorded(**times, spread=settled.spread)
        return self._complete(plan)

    def keep(self, plan: Plan, exploration: Exploration) -> None:
        """Writes a plan and the times of launches to the database."""
        for dim in divided_dims(self.problem):
            for option in exploration.launches.options(dim):
                self.measurement.adopt(dim, option)
        if not self.avoids_stock:
            self.recollection.keep_stock(plan.record.stock_seconds)
        if not plan.is_stock:
            whole = Option(self.problem.extent, plan.schedule.name, plan.record.seconds, plan.division.workspace)
            self.measurement.logbook.record_later(self.problem, whole)
        self.settle(plan)

    def settle(self, plan: Plan) -> None:
        """Writes a plan to the database, until another is found."""
        self.measurement.logbook.settle(self.problem, self.terms, self.values(plan))

    def values(self, plan: Plan) -> dict[str, Any]:
        """A plan as plain values, from which `plan_of` makes it again."""
        return {
            "dim": plan.division.dim,
            "parts": [astuple(option) for option in plan.division.options],
            **{name: getattr(plan.record, name) for name in _SECONDS},
            "options": {str(dim): [astuple(option) for option in options] for dim, options in plan.options.items()},
            "wrong": dict(plan.record.wrong),
            "spread": plan.record.spread,
        }

    def recorded_plan(self) -> Plan | None:
        """The plan that an earlier run found under the same terms, if all its algorithms are still available."""
        values = self.measurement.logbook.settlement(self.problem, self.terms)
        return None if values is None else self.plan_of(values)

    def plan_of(self, values: Mapping[str, Any]) -> Plan | None:
        """The plan that was written as plain values; `None` if not all its algorithms are available.

        Algorithms that its maker has found wrong are noted here, too.
        """
        self.measurement.logbook.note_wrong(self.problem, values.get("wrong", {}))
        division = Division(tuple(Option(*part) for part in values["parts"]), values["dim"])
        plan = self.stock(values["stock_seconds"]).divided(division)
        if not plan.is_stock and not {o.algorithm for o in division.options} <= self.providers.keys():
            return None
        options = {Dim(dim): [Option(*one) for one in found] for dim, found in values.get("options", {}).items()}
        plan = plan.recorded(**{name: values[name] for name in _SECONDS}, spread=values.get("spread", math.inf))
        return self._complete(replace(plan, options=options))

    def _complete(self, plan: Plan) -> Plan:
        """The plan, its record completed by the workspace that its algorithms but torch's would need undivided."""
        whole, used = Dim.BATCH, {algorithm for algorithm, _ in plan.division.runs()} - {STOCK}
        needs = [
            self.measurement.workspace(one, whole, self.problem.extent)
            for one in self.offers.candidates(self.problem, whole)
            if one[1] in used
        ]
        return plan.recorded(whole_workspace=max((need for need in needs if need is not None), default=0))


def is_too_short(seconds: float) -> bool:
    """Whether a convolution is left to torch's own kernel, as calling another from Python takes about as long."""
    return seconds < LEAST_SECONDS
