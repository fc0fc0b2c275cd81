"""Prospects: what live planning may try for a problem, and how its result becomes a plan and is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from mucudnn.convolution.problem import ConvProblem, Dim, Shape
from mucudnn.convolution.tile import dims, extent
from mucudnn.devices import device_of
from mucudnn.optimizer import Division, Exploration, Key, Option, OverheadBudget, RelativeTimes, Settled, Trial, Variant
from mucudnn.planning.affordable_parts import AffordableParts
from mucudnn.planning.candidate_sizes import Sizes
from mucudnn.planning.plan import MARGIN, Plan
from mucudnn.planning.planner import LEAST_SECONDS, Planner
from mucudnn.planning.search import PARTS_MARGIN
from mucudnn.providers import STOCK, Provider
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.timing.environment import Environment
from mucudnn.timing.measurement import Candidate, Measurement
from mucudnn.timing.schedule import Schedule
from mucudnn.timing.survey import Task

FORECAST = 1.5, 50.0
"""For an algorithm other than torch's: expected seconds in units of torch's kernel on the whole, and their uncertainty.
Next to nothing is known before the first trial, which therefore computes only a part of the call."""

PARTS_FORECAST = 1.0, 1.5
"""The same for torch's own kernel on parts."""


@dataclass(frozen=True)
class Prospects:
    """One problem within one limit.

    Attributes:
        planner: of the problem's device.
        measurement: what is known of the problem.
        limit: bytes of workspace.
        policy: the sizes of parts that may be tried.
    """

    planner: Planner
    measurement: Measurement
    limit: float
    policy: str

    @property
    def problem(self) -> ConvProblem:
        """The convolution."""
        return self.measurement.problem

    @property
    def is_deterministic(self) -> bool:
        """Whether runs are to compute the same."""
        return self.measurement.logbook.environment.deterministic

    @property
    def terms(self) -> dict[str, Any]:
        """What decides on the plan besides the problem and the environment."""
        terms = {"limit": str(self.limit), "policy": self.policy, "engines": self.planner.engines}
        return {**terms, "check": self.planner.checks}

    def exploration(
        self,
        seconds: Sequence[float],
        overhead: OverheadBudget,
        relative_times: RelativeTimes,
        launches: dict[Key, list[float]] | None = None,
    ) -> Exploration:
        """The exploration of all that may be tried.

        Args:
            seconds: measured times of torch's own kernel on the whole.
            relative_times: of other problems in the same environment.
            launches: times of the problem's launches, shared with its explorations within other limits.
        """
        warm_ups = int(device_of(self.planner.device).is_asynchronous)
        variants, margins = self._variants(min(seconds), relative_times), (MARGIN, PARTS_MARGIN)
        return Exploration(STOCK, seconds, variants, overhead, margins, warm_ups, launches)

    def _variants(self, stock_seconds: float, relative_times: RelativeTimes) -> list[Variant]:
        """What may be tried, without algorithms that cannot win by their times for similar problems.

        Of these not even the workspaces are queried, which is what takes most of the time of preparing an exploration.
        """
        allowed = min(self.limit, device_of(self.planner.device).memory // 2)
        found: list[Variant] = []
        wrong = self.measurement.logbook.wrong(self.problem) if self.planner.checks else {}

        def may_win(candidate: Candidate) -> bool:
            return candidate[1] not in wrong and self._may_win(candidate, relative_times)

        affordable: Mapping[Task, dict[int, int]] = {}
        if self.planner.are_plans_costly:
            parts = AffordableParts(self.planner.offers, self.measurement, allowed, self.policy, may_win)
            offered, affordable = parts.offered, parts.fitting
        else:
            offered = self.planner.within(self.measurement, allowed)
        for dim in dims(self.problem):
            whole = extent(self.problem, dim)
            others: list[Variant] = []
            # Torch's own kernel comes last: it computes the rest of the whole beside parts of the others.
            along = [one for (place, _), one in offered.items() if place is dim]
            for candidate in sorted(along, key=lambda found: found[1] == STOCK):
                name, is_stock = candidate[1], candidate[1] == STOCK
                if name in wrong or (not may_win(candidate) and not (is_stock and others)):
                    continue
                ratio, uncertainty = self._forecast(name, relative_times) or (PARTS_FORECAST if is_stock else FORECAST)
                fitting, rests = affordable.get((dim, name)), dict[int, int]()
                if fitting is None:
                    tried = Sizes(self.measurement, candidate, dim, allowed, self.policy)
                    left = {whole - size for variant in others for size in variant.workspaces} - {0}
                    fitting, rests = tried.fitting(tried.all), tried.fitting(left if is_stock else ())
                others.append(Variant(dim, name, whole, fitting, ratio * stock_seconds, uncertainty, rests))
            found += others
        return found

    def _forecast(self, name: str, relative_times: RelativeTimes) -> tuple[float, float] | None:
        return relative_times.forecast(
            _kind(name, self.problem, self.measurement.logbook.environment), _sizes(self.problem)
        )

    def _may_win(self, candidate: Candidate, relative_times: RelativeTimes) -> bool:
        """Whether an algorithm may win by its times for similar problems; one that cuDNN compiles takes such times."""
        provider, name = candidate
        known = self._forecast(name, relative_times)
        if known is None and isinstance(provider, Engines) and provider.is_compiled(self.problem, name):
            return False
        ratio, uncertainty = known or (PARTS_FORECAST if name == STOCK else FORECAST)
        return ratio / uncertainty < 1 - (PARTS_MARGIN if name == STOCK else MARGIN)

    def note_times(self, relative_times: RelativeTimes, exploration: Exploration) -> None:
        """Notes the times of algorithms, in units of torch's own kernel on the whole."""
        note_times(relative_times, self.problem, self.measurement.logbook.environment, _ratios(exploration))

    def schedule(self, trial: Trial) -> Schedule:
        """What computes a trial."""
        assert trial.division is not None, "torch's own kernel needs none"
        return Schedule(self.problem, Dim(trial.dim), trial.division, self._providers)

    @cached_property
    def _providers(self) -> dict[str, Provider]:
        return self.planner.providers(self.problem)

    def stock(self, seconds: float) -> Plan:
        """Torch's own kernel as the plan."""
        whole = Division((Option(self.problem.extent, STOCK, seconds, 0),))
        schedule = Schedule(self.problem, Dim.BATCH, whole, self._providers)
        wrong = tuple(self.measurement.logbook.wrong(self.problem).items())
        return Plan(schedule, self.limit, {}, seconds, seconds, seconds, wrong=wrong, checks=self.planner.checks)

    def so_far(self, exploration: Exploration) -> Plan:
        """Torch's own kernel, and what was tried beside it."""
        plan = self.stock(exploration.baseline_seconds)
        tries = tuple(sorted(exploration.tries.items()))
        leader, seconds = exploration.leader()
        return replace(
            plan,
            trials=exploration.tried,
            cost=exploration.lost,
            tries=tries,
            leader=leader,
            leader_seconds=seconds,
        )

    def found(self, exploration: Exploration, settled: Settled) -> Plan:
        """The plan that the exploration has settled on, with all known launches."""
        options = {dim: exploration.launches.options(dim) for dim in dims(self.problem)}
        plan = replace(self.so_far(exploration), options=options, leader=None)
        if settled.division is not None:
            plan = plan.divided(Dim(settled.dim), settled.division)
            plan = replace(plan, seconds=settled.seconds, undivided_seconds=settled.undivided_seconds)
        return replace(plan, whole_workspace=self.planner.whole_workspace(self.measurement, plan))

    def keep(self, plan: Plan, exploration: Exploration) -> None:
        """Writes a plan and the times of launches to the database."""
        for dim in dims(self.problem):
            for option in exploration.launches.measured(dim):
                self.measurement.adopt(dim, option)
        self.record_stock(plan.stock_seconds)
        if not plan.is_stock:
            logbook, problem = self.measurement.logbook, self.problem
            whole = Option(problem.extent, plan.schedule.name, plan.seconds, plan.division.workspace)
            logbook.record(problem, whole)
        self._settle(plan, _ratios(exploration))

    def record_stock(self, seconds: float) -> None:
        """Writes the time of torch's own kernel on the whole to the database."""
        whole = Option(self.problem.extent, STOCK, seconds, 0)
        self.measurement.logbook.record(self.problem, whole)

    def keep_stock(self, seconds: float) -> None:
        """Writes torch's own kernel to the database as the plan, until another is found."""
        self._settle(self.stock(seconds), {})

    def _settle(self, plan: Plan, ratios: Mapping[str, float]) -> None:
        values = {
            "dim": plan.dim,
            "parts": [_values(option) for option in plan.division.options],
            "seconds": plan.seconds,
            "undivided_seconds": plan.undivided_seconds,
            "stock_seconds": plan.stock_seconds,
            "ratios": dict(ratios),
            "options": {str(dim): [_values(option) for option in options] for dim, options in plan.options.items()},
        }
        self.measurement.logbook.settle(self.problem, self.terms, values)

    def kept(self) -> Plan | None:
        """The plan that an earlier run found under the same terms, if all its algorithms are still available."""
        values = self.measurement.logbook.settlement(self.problem, self.terms)
        if values is None:
            return None
        division, dim = Division(tuple(Option(*part) for part in values["parts"])), Dim(values["dim"])
        plan = self.stock(values["stock_seconds"]).divided(dim, division)
        if not plan.is_stock and not {o.algorithm for o in division.options} <= self._providers.keys():
            return None
        options = {Dim(dim): [Option(*one) for one in found] for dim, found in values.get("options", {}).items()}
        plan = replace(plan, options=options, **{name: values[name] for name in ("seconds", "undivided_seconds")})
        return replace(plan, whole_workspace=self.planner.whole_workspace(self.measurement, plan))


def _values(option: Option) -> list[Any]:
    return [option.extent, option.algorithm, option.seconds, option.workspace]


def is_too_short(seconds: float) -> bool:
    """Whether a convolution is left to torch's own kernel, as calling another from Python takes about as long."""
    return seconds < LEAST_SECONDS


@dataclass(frozen=True)
class Experience:
    """What earlier runs have found.

    Attributes:
        relative_times: times of algorithms.
        shapes: directions and shapes of input and weight for which a plan may be on record.
    """

    relative_times: RelativeTimes
    shapes: frozenset[tuple[str, Shape, Shape]]


def experience(settlements: Iterable[tuple[dict[str, Any], dict[str, Any], Any]]) -> Experience:
    """What earlier runs have found.

    Args:
        settlements: `Store.settlements()`.
    """
    relative_times, names, shapes = RelativeTimes(), [field.name for field in fields(Environment)], set()
    for key, terms, values in settlements:
        if "ratios" not in values:
            continue  # a plan that was measured ahead
        problem = ConvProblem.from_launch_key(key, terms["extent"])
        note_times(relative_times, problem, Environment(**{name: key[name] for name in names}), values["ratios"])
        shapes.add((str(problem.direction), problem.input_shape, problem.w_shape))
    return Experience(relative_times, frozenset(shapes))


def note_times(
    relative_times: RelativeTimes, problem: ConvProblem, environment: Environment, ratios: Mapping[str, float]
) -> None:
    """Notes the times of algorithms for a problem, in units of torch's own kernel on the whole."""
    for algorithm, ratio in ratios.items():
        relative_times.add(_kind(algorithm, problem, environment), _sizes(problem), ratio)


def _ratios(exploration: Exploration) -> dict[str, float]:
    stock_seconds = exploration.baseline_seconds
    return {name: seconds / stock_seconds for name, seconds in exploration.launches.fastest().items()}


def _kind(algorithm: str, problem: ConvProblem, environment: Environment) -> str:
    """The kind of product whose times are comparable; those of other kinds say little about it."""
    kind = problem.direction, problem.dims, problem.transposed, problem.dtype, *problem.formats
    return " ".join(map(str, (algorithm, *kind, environment)))


def _sizes(problem: ConvProblem) -> tuple[float, ...]:
    """The numbers on which times depend: samples, channels, filters, places, taps, stride and groups."""
    places, taps = math.prod(problem.y_shape[2:]), math.prod(problem.w_shape[2:])
    channels, filters = problem.x_shape[1], problem.y_shape[1]
    return problem.extent, channels, filters, places, taps, math.prod(problem.stride), problem.groups
