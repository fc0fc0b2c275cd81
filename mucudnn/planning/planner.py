"""Planner: finds the fastest measured division of a problem within a limit."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mucudnn.convolution.operands import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Shape
from mucudnn.devices import device_of
from mucudnn.optimizer import Costs, Division, Option
from mucudnn.planning.counted import counted, counting, scratch_of
from mucudnn.planning.frugal_search import FrugalSearch
from mucudnn.planning.offers import Offers
from mucudnn.planning.plan import MARGIN, Plan, enlarged, surviving
from mucudnn.planning.search import PARTS_MARGIN, Search, costs_on_record
from mucudnn.providers import STOCK, Compiling, Provider, providers_on
from mucudnn.settings import Settings
from mucudnn.timing import progress
from mucudnn.timing.board import Board
from mucudnn.timing.compiled_plans import CompiledPlans
from mucudnn.timing.environment import Environment
from mucudnn.timing.logbook import Logbook
from mucudnn.timing.measurement import Candidate, Measurement
from mucudnn.timing.schedule import LaunchError, Schedule
from mucudnn.timing.store import Store
from mucudnn.timing.survey import Survey, Task, Worker

LEAST_SECONDS = 1e-4
"""Convolutions that torch's own kernel computes in less than this are left to it: to call an algorithm from Python
costs about as much time."""

ATTEMPTS = 3
"""Divisions that are compared with torch's own kernel. If none of them is faster, that kernel is kept."""

HOST = torch.device("cpu")

_log = logging.getLogger("mucudnn")


class Planner:
    """Measures what the database does not know yet, then decides.

    Attributes:
        device: where the problems are.
        offers: what is tried there.
        are_plans_costly: whether every question for a workspace makes a plan of cuDNN's.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        providers: Sequence[Provider] | None = None,
        device: torch.device = HOST,
        board: Board | None = None,
    ) -> None:
        """
        Args:
            providers: of algorithms; those of the device if not given.
            device: where the problems are.
            board: where other processes with the same program post what they measure.

        Raises:
            Unavailable: where cuDNN cannot be used, for a GPU.
        """
        self._settings = settings
        self._store = store
        self.device = device
        self._board = board
        self._costs: dict[Environment, Costs] = {}
        self.are_plans_costly = device_of(device).uses_cudnn
        providers = providers_on(device, settings.engines) if providers is None else providers
        for provider in providers:
            if isinstance(provider, Compiling):
                provider.archive = CompiledPlans(store, device_of(device)) if store.persistent else None
        # What a GPU's kernels hold is not known: there nothing is counted.
        self._counts = settings.count_stock and device == HOST
        if self._counts:
            providers = [counted(provider) for provider in providers]
        self.offers = Offers(providers, self.are_plans_costly)
        wanted = settings.benchmark_devices
        self._peers = [
            Planner(replace(settings, benchmark_devices=None), store, device=peer)
            for peer in (() if wanted is None else device_of(device).peers(wanted))
        ]

    @property
    def engines(self) -> str:
        """Which engines of cuDNN are tried, the setting's name of them."""
        return self._settings.engines

    @property
    def checks(self) -> bool:
        """Whether results are checked before an algorithm is used."""
        return self._settings.check

    @property
    def compares(self) -> bool:
        """Whether a check may hold a second result: where budgets come from a step's memory, a sample must do."""
        return not self._settings.is_by_step

    def providers(self, problem: ConvProblem) -> dict[str, Provider]:
        """Who serves the problem or parts of it, by algorithm."""
        return self.offers.providers(problem)

    def within(self, measurement: Measurement, allowed: float) -> dict[Task, Candidate]:
        """Who serves parts of a problem along which dim, within so many bytes or not."""
        return self.offers.within(measurement, allowed)

    def candidates(self, problem: ConvProblem, dim: Dim) -> list[Candidate]:
        """Who serves parts of the problem along a dim, by which algorithms."""
        return self.offers.candidates(problem, dim)

    def measurement(
        self,
        problem: ConvProblem,
        operands: Operands | None = None,
        strides: Shape | None = None,
        first: float | None = None,
    ) -> Measurement:
        """What is known of a problem under the present environment, and the means to measure the rest.

        Args:
            problem: the convolution.
            operands: tensors to measure with, of which nothing is written; made up if not given.
            strides: of the result; those of the target among the operands if not given.
            first: seconds of a call of torch's own kernel with the operands, if that was timed.
        """
        current = Environment.current(self.device)
        logbook = Logbook(counting(current) if self._counts else current, self._store, self._board)
        return Measurement(problem, logbook, operands, strides, self.device, first)

    def plan(self, measurement: Measurement, limit: float | None = None) -> Plan:
        """The fastest division of a problem within a limit.

        Args:
            limit: bytes of workspace; that of the settings if not given.
        """
        problem = measurement.problem
        stock = self.measured(measurement, self._settings.workspace_limit if limit is None else limit)
        plan = self._fastest(measurement, stock)
        if len(plan.division.options) > 1:
            whole = [option for option in stock.options.get(Dim.BATCH, ()) if option.extent == problem.extent]
            undivided = self._fastest(measurement, replace(stock, options={Dim.BATCH: whole}))
            divided = replace(plan, undivided_seconds=undivided.seconds)
            plan = min(replace(undivided, options=stock.options), divided, key=Plan.rank)
        wrong = tuple(measurement.logbook.wrong(problem).items())
        plan = replace(plan, whole_workspace=self.whole_workspace(measurement, plan), wrong=wrong)
        _log.info("%s %s: %s %s", problem.direction, problem, plan.dim, plan.division.runs())
        return plan

    def whole_workspace(self, measurement: Measurement, plan: Plan) -> int:
        """What the division's algorithms other than torch's own would need undivided."""
        whole, used = Dim.BATCH, {algorithm for algorithm, _ in plan.division.runs()} - {STOCK}
        needs = [
            measurement.workspace(one, whole, plan.problem.extent)
            for one in self.candidates(plan.problem, whole)
            if one[1] in used
        ]
        return max((need for need in needs if need is not None), default=0)

    def _fastest(self, measurement: Measurement, stock: Plan) -> Plan:
        """The fastest division made of a plan's options that proves faster than torch's own kernel, or else that.

        Where that kernel does not fit, the fastest that does.
        """
        problem, stock_seconds = stock.problem, stock.stock_seconds
        options = {**stock.options}
        attempts = 0
        while attempts < ATTEMPTS or not stock.stock_fits:
            attempts += 1
            dim, division = stock.best(options)
            attempt = stock.divided(dim, division)
            if attempt.is_stock:
                break
            used = {algorithm for algorithm, _ in division.runs()}
            most = 1 - (PARTS_MARGIN if used == {STOCK} else MARGIN) if stock.stock_fits else math.inf
            if division.seconds > most * stock_seconds:
                options[dim] = [option for option in options[dim] if option.algorithm not in used]
                continue
            try:
                larger = enlarged(options[dim], division, measurement.workspaces(attempt.schedule))
                if larger != options[dim]:
                    options[dim] = larger
                    continue
                seconds = measurement.division_seconds(attempt.schedule, most)
            except LaunchError as error:
                _log.warning("%s %s: %s", problem.direction, problem, error)
                options[dim] = surviving(options[dim], error)
                continue
            if seconds <= most * stock_seconds:
                wrong = measurement.faults(attempt.schedule, self.compares) if self.checks else {}
                if used & wrong.keys():
                    options = {dim: [o for o in options[dim] if o.algorithm not in wrong] for dim in options}
                    attempts -= 1
                    continue
                return replace(attempt, seconds=seconds, undivided_seconds=seconds)
            # Its launches were faster when they were timed alone. From here on they count as measured together.
            correction = seconds / division.seconds
            options[dim] = [
                replace(option, seconds=option.seconds * correction) if option.algorithm in used else option
                for option in options[dim]
            ]
        return stock

    def measured(self, measurement: Measurement, limit: float) -> Plan:
        """Torch's own kernel as the plan, beside it all options within the limit that were worth measuring."""
        problem, stock_seconds = measurement.problem, measurement.stock_seconds()
        options: dict[Dim, list[Option]] = {}
        providers: Mapping[str, Provider] = {}
        held = scratch_of(problem, measurement.turn()) if self._counts else None
        takes_any = (held or 0) > limit
        if self._settings.workspace_limit > 0 and (stock_seconds >= LEAST_SECONDS or takes_any):
            providers = self.providers(problem)
            for (dim, _), launches in self._surveyed(measurement, limit, takes_any).items():
                options.setdefault(dim, []).extend(launches)
        whole = Division((Option(problem.extent, STOCK, stock_seconds, held or 0),))
        schedule = Schedule(problem, Dim.BATCH, whole, providers)
        seconds = (stock_seconds,) * 3
        return Plan(schedule, limit, options, *seconds, checks=self.checks, stock_workspace=held)

    def _surveyed(self, measurement: Measurement, limit: float, takes_any: bool) -> dict[Task, list[Option]]:
        """The launches of every algorithm along every dim that were worth measuring.

        Which ones these are is kept, as it depends on all that was known at the time: the next run is to come to the
        same plans.
        """
        problem, policy = measurement.problem, self._settings.policy
        terms = {"limit": str(limit), "policy": policy, "engines": self.engines, "search": "ahead"}
        sizes: dict[str, list[int]] | None = measurement.logbook.settlement(problem, terms)
        search, found = self._search(measurement, limit, takes_any), dict[Task, list[Option]]()
        for candidates in search.rounds(self.offers, sizes, found):
            # What may gain most comes first: what is slower than that need not be measured.
            tasks = sorted(candidates, key=lambda task: search.lower_bound(candidates[task], task[0]))
            workers = [self._worker(search, candidates, sizes)]
            for peer in self._peers:
                there = peer._search(measurement.elsewhere(peer.device), limit)
                workers.append(peer._worker(there, peer.offers.named(problem, tasks), sizes))
            with progress.bar(len(tasks), f"{problem.direction} {problem}", self._settings.progress) as advance:
                survey = Survey(measurement, tasks, {"limit": limit, "policy": policy})
                measured = dict(zip(tasks, survey.by(workers, advance), strict=True))
            found |= {task: measured[task] for task in candidates}
        if sizes is None:
            sizes = {f"{dim} {name}": [o.extent for o in found[dim, name]] for dim, name in found}
            measurement.logbook.settle(problem, terms, sizes)
        return found

    def _search(self, measurement: Measurement, limit: float, takes_any: bool = False) -> Search:
        environment = measurement.logbook.environment
        if environment not in self._costs:
            self._costs[environment] = costs_on_record(self._store, environment)
        given = measurement, self._costs[environment], self._allowed(limit), self._settings.policy
        if not self.are_plans_costly:
            return Search(*given, takes_any)
        # Totals, and whoever measures without a limit, choose among divisions by their workspaces.
        compares_workspaces = limit == math.inf or self._settings.total_workspace_size is not None
        return FrugalSearch(*given, lambda: self.offers.plans_made, compares_workspaces)

    def _allowed(self, limit: float) -> float:
        """Bytes that a launch may use: the limit, or half of the device's memory."""
        return min(limit, device_of(self.device).memory // 2)

    @staticmethod
    def _worker(search: Search, known: Mapping[Task, Candidate], sizes: Mapping[str, Sequence[int]] | None) -> Worker:
        """Measures the launches of an algorithm along a dim.

        Args:
            known: who serves on the device.
            sizes: that an earlier search came to; `None` if there was none.
        """

        def worker(dim: Dim, name: str) -> list[Option]:
            candidate = known.get((dim, name))
            if candidate is None:
                return []
            if sizes is None:
                return list(search.options(candidate, dim))
            return list(search.chosen(candidate, dim, sizes.get(f"{dim} {name}", ())))

        return worker
