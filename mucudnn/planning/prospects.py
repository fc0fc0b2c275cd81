"""Prospects: what live planning may try for a problem, and how what it found becomes a plan and is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from mucudnn.convolution.problem import ConvProblem, Dim
from mucudnn.convolution.tile import dims, extent
from mucudnn.devices import device_of
from mucudnn.optimizer import Division, Exploration, Launches, Lessons, Option, Purse, Settled, Trial, Way
from mucudnn.planning.plan import MARGIN, Plan
from mucudnn.planning.planner import LEAST_SECONDS, PARTS_MARGIN, Planner, Sizes
from mucudnn.providers import STOCK, Provider
from mucudnn.timing.environment import Environment
from mucudnn.timing.measurement import Measurement
from mucudnn.timing.schedule import Schedule

FORECAST = 1.5, 50.0
"""Of an algorithm that is not torch's own: seconds in units of torch's kernel on the whole, and the doubt about that.
Next to nothing is known before the first trial, which is therefore on a part of the call."""

PARTS_FORECAST = 1.0, 1.5
"""Of torch's own kernel on parts."""


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
    def terms(self) -> dict[str, Any]:
        """What beside problem and environment decides which plan is found."""
        return {"limit": str(self.limit), "policy": self.policy, "engines": self.planner.engines}

    def exploration(self, seconds: Sequence[float], purse: Purse, lessons: Lessons) -> Exploration:
        """All that may be tried, none of it yet.

        Args:
            seconds: of torch's own kernel on the whole.
            lessons: of other problems in the same environment.
        """
        rehearsals = int(device_of(self.planner.device).is_asynchronous)
        return Exploration(STOCK, seconds, self._ways(min(seconds), lessons), purse, (MARGIN, PARTS_MARGIN), rehearsals)

    def _ways(self, stock_seconds: float, lessons: Lessons) -> list[Way]:
        allowed = min(self.limit, device_of(self.planner.device).memory // 2)
        environment, sizes = self.measurement.logbook.environment, _sizes(self.problem)

        def forecast(algorithm: str) -> tuple[float, float] | None:
            return lessons.forecast(_lesson(algorithm, self.problem, environment), sizes)

        found: list[Way] = []
        for dim in dims(self.problem):
            whole = extent(self.problem, dim)
            others: list[Way] = []
            # Torch's own kernel comes last: it computes what the parts of the others leave.
            for candidate in sorted(self.planner.candidates(self.problem, dim), key=lambda found: found[1] == STOCK):
                tried = Sizes(self.measurement, candidate, dim, allowed, self.policy)
                fitting, rests = tried.fitting(tried.all), {}
                ratio, doubt = forecast(candidate[1]) or FORECAST
                if candidate[1] == STOCK:
                    ratio, doubt = forecast(STOCK) or PARTS_FORECAST
                    rests = tried.fitting({whole - size for way in others for size in way.workspaces} - {0})
                others.append(Way(dim, candidate[1], whole, fitting, ratio * stock_seconds, doubt, rests))
            found += others
        return found

    def teach(self, lessons: Lessons, ratios: Mapping[str, float]) -> None:
        """Notes what algorithms took, in units of torch's own kernel on the whole."""
        teach(lessons, self.problem, self.measurement.logbook.environment, ratios)

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
        return Plan(schedule, self.limit, {}, seconds, seconds, seconds)

    def so_far(self, exploration: Exploration) -> Plan:
        """Torch's own kernel, and what was tried beside it."""
        plan = self.stock(exploration.baseline_seconds)
        return replace(plan, trials=exploration.tried, cost=exploration.lost)

    def found(self, exploration: Exploration, settled: Settled) -> Plan:
        """The plan that exploring came to, with all that it knows of launches."""
        options = {dim: exploration.launches.options(dim) for dim in dims(self.problem)}
        plan = replace(self.so_far(exploration), options=options)
        if settled.division is not None:
            plan = plan.divided(Dim(settled.dim), settled.division)
            plan = replace(plan, seconds=settled.seconds, undivided_seconds=settled.undivided_seconds)
        return replace(plan, whole_workspace=self.planner.whole_workspace(plan))

    def keep(self, plan: Plan, launches: Launches) -> dict[str, float]:
        """Writes a plan and the times of launches to the database.

        Returns:
            What each algorithm took, in units of torch's own kernel.
        """
        for dim in dims(self.problem):
            for option in launches.measured(dim):
                self.measurement.adopt(dim, option)
        logbook, problem = self.measurement.logbook, self.problem
        logbook.record(problem, Option(problem.extent, STOCK, plan.stock_seconds, 0))
        if not plan.is_stock:
            whole = Option(problem.extent, plan.schedule.name, plan.seconds, plan.division.workspace)
            logbook.record(problem, whole)
        parts = [[o.extent, o.algorithm, o.seconds, o.workspace] for o in plan.division.options]
        ratios = {name: seconds / plan.stock_seconds for name, seconds in launches.fastest().items()}
        times = {"seconds": plan.seconds, "undivided_seconds": plan.undivided_seconds}
        logbook.settle(
            problem,
            self.terms,
            {"dim": plan.dim, "parts": parts, "stock_seconds": plan.stock_seconds, "ratios": ratios, **times},
        )
        return ratios

    def kept(self) -> Plan | None:
        """The plan that an earlier run came to under the same terms, if all of it is still there."""
        values = self.measurement.logbook.settlement(self.problem, self.terms)
        if values is None:
            return None
        division, dim = Division(tuple(Option(*part) for part in values["parts"])), Dim(values["dim"])
        plan = self.stock(values["stock_seconds"]).divided(dim, division)
        if not plan.is_stock and not {o.algorithm for o in division.options} <= self._providers.keys():
            return None
        seconds = {name: values[name] for name in ("seconds", "undivided_seconds")}
        plan = replace(plan, **seconds)
        return replace(plan, whole_workspace=self.planner.whole_workspace(plan))


def is_too_short(seconds: float) -> bool:
    """Whether a convolution is left to torch's own kernel, as calling another from Python takes about as long."""
    return seconds < LEAST_SECONDS


def lessons_of(settlements: Iterable[tuple[dict[str, Any], dict[str, Any], Any]]) -> Lessons:
    """What earlier runs have learnt.

    Args:
        settlements: `Store.settlements()`.
    """
    lessons, names = Lessons(), [field.name for field in fields(Environment)]
    for key, terms, values in settlements:
        problem = ConvProblem.from_launch_key(key, terms["extent"])
        teach(lessons, problem, Environment(**{name: key[name] for name in names}), values["ratios"])
    return lessons


def teach(lessons: Lessons, problem: ConvProblem, environment: Environment, ratios: Mapping[str, float]) -> None:
    """Notes what algorithms took for a problem, in units of torch's own kernel on the whole."""
    for algorithm, ratio in ratios.items():
        lessons.add(_lesson(algorithm, problem, environment), _sizes(problem), ratio)


def _lesson(algorithm: str, problem: ConvProblem, environment: Environment) -> str:
    """What is learnt together: times of one kind of product, which those of other kinds tell little of."""
    kind = problem.direction, problem.dims, problem.transposed, problem.dtype, *problem.formats
    return " ".join(map(str, (algorithm, *kind, environment)))


def _sizes(problem: ConvProblem) -> tuple[float, ...]:
    """What times depend on: samples, channels, filters, places, taps, stride and groups."""
    places, taps = math.prod(problem.y_shape[2:]), math.prod(problem.w_shape[2:])
    channels, filters = problem.x_shape[1], problem.y_shape[1]
    return problem.extent, channels, filters, places, taps, math.prod(problem.stride), problem.groups
