"""Finds the fastest measured division of a problem within a limit, ahead of the first call.

The workspace of its providers may include the scratch memory of torch's own kernels (`counted`): the columns of plain
kernels, oneDNN's scratchpads and reordered tensors, and on a GPU cuDNN's workspaces. That is all that torch's allocator
sees on the calling thread. Code and tables of libraries are not counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Shape
from mucudnn.devices import device_of
from mucudnn.devices.allocations import peak_bytes
from mucudnn.optimizer import Exploration, OverheadBudget, Trial
from mucudnn.planning.experience import Experience
from mucudnn.planning.offers import Offers
from mucudnn.planning.plan import Plan
from mucudnn.planning.search import Search
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.process import switching_often
from mucudnn.providers import Provider, providers_on, stock_result
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.slices import Slices
from mucudnn.providers.stock import Stock, columns_bytes
from mucudnn.settings import Settings
from mucudnn.timing import progress
from mucudnn.timing.board import Board
from mucudnn.timing.logbook import CompiledPlans, Environment, Logbook
from mucudnn.timing.measurement import Measurement, synthetic_operands
from mucudnn.timing.schedule import LaunchError
from mucudnn.timing.store import Store

HOST = torch.device("cpu")


def counted(provider: Provider, scratch: Callable[[ConvProblem], int]) -> Provider:
    """The provider; ``scratch``, bytes of torch's own kernel for a problem, counts within its workspaces."""
    return provider.counting(scratch) if isinstance(provider, Stock | Slices) else provider


def scratch(problem: ConvProblem, place: torch.device = HOST) -> int:
    """Bytes of torch's own kernel beyond operands and result at its peak, on contiguous or channels-last zeros."""
    return _scratch(problem, place, device_of(place).switches())


@lru_cache(maxsize=4096)
def _scratch(problem: ConvProblem, place: torch.device, switches: tuple[object, ...]) -> int:
    """`scratch`, cached also by the switches of torch that a program may change."""
    given = synthetic_operands(problem, place, torch.zeros)
    if device_of(place).uses_cudnn:
        stock_result(problem, given)  # a first call may try kernels that need more
    return scratch_of(problem, given)


def scratch_of(problem: ConvProblem, given: Operands) -> int:
    """Bytes of torch's own kernel beyond these operands and its result at its peak, by one call.

    Raises:
        RuntimeError: where it cannot be counted, or where the kernel fails.
    """
    peak = peak_bytes(lambda: stock_result(problem, given), given.w.device)
    return max(0, peak - problem.element_bytes * math.prod(problem.target_shape))


PATIENCE = 20.0
"""Timing launches beyond the first of each algorithm may take so many times the time of torch's own kernel."""


def plan_ahead(search: Search) -> Plan:
    """The plan of a problem within a limit, from the database or measured now."""
    if (recorded := search.recorded_plan()) is not None:
        return recorded
    stock_seconds = search.assumed_seconds or search.measurement.stock_seconds()
    if search.settings.workspace_limit == 0 or search.is_too_short(stock_seconds):
        plan = search.stock(stock_seconds)
        search.settle(plan)
        return plan
    exploration = search.exploration([stock_seconds], OverheadBudget(balance=math.inf), is_live=False)
    _Trials(search, exploration).make()
    assert exploration.settled is not None, "everything is granted"
    if exploration.settled.division is None and (wider := search.with_compiled()) is not None:
        return plan_ahead(wider)
    plan = search.found(exploration, exploration.settled).recorded(trials=0, cost=0.0, tries=())  # none in its calls
    search.keep(plan, exploration)
    return plan


class _Trials:
    """The trials of one exploration, until it is settled."""

    def __init__(self, search: Search, exploration: Exploration) -> None:
        self._search, self._exploration = search, exploration
        self._runner = TrialRunner(search)
        self._spent = 0.0

    def make(self) -> None:
        """Makes the trials."""
        exploration = self._exploration
        while (trial := exploration.trial()) is not None:
            if trial.by_launch:
                self._survey(trial)
                continue
            try:
                exploration.learn(trial, sum(self._runner.laps(trial, self._search.measurement.turn())))
            except LaunchError as error:
                exploration.fail(trial, error.algorithm, error.extent)

    def _survey(self, trial: Trial) -> None:
        """Times the first launch of a trial: the others would only compute the rest of a call."""
        exploration, search, key = self._exploration, self._search, trial.keys[0]
        assert trial.division is not None, "torch's own kernel has no launches"
        dim, algorithm, size = key
        most = exploration.bar(algorithm) * size / trial.division.extent
        try:
            seconds = search.measurement.seconds((search.providers[algorithm], algorithm), Dim(dim), size, most)
        except LaunchError as error:
            exploration.fail(trial, error.algorithm, error.extent)
            return
        self._spent += seconds if exploration.launches.is_timed(dim, algorithm) else 0.0
        exploration.adopt({key: seconds / exploration.baseline_seconds})
        search.note(key, seconds)
        if self._spent > PATIENCE * exploration.baseline_seconds:
            exploration.end_survey()


_log = logging.getLogger("mucudnn")


class Planner:
    """Plans the convolutions of one device.

    Attributes:
        device: where the problems are.
        offers: the algorithms that are tried there.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        providers: Sequence[Provider] | None = None,
        device: torch.device = HOST,
        board: Board | None = None,
        experience: Experience | None = None,
    ) -> None:
        """
        Args:
            providers: of algorithms; those of the device if not given.
            board: where other processes with the same program post their plans.
            experience: shared with other planners; if not given, one of the times in the database.

        Raises:
            Unavailable: where cuDNN cannot be used, for a GPU.
        """
        self.device = device
        self._settings, self._store, self._board = settings, store, board
        self._experience = experience or Experience(store)
        providers = providers_on(device, settings.engines) if providers is None else providers
        for provider in providers:
            if isinstance(provider, Engines):
                provider.archive = CompiledPlans(store, device_of(device)) if store.persistent else None
        self._counts = settings.count_stock
        if self._counts:
            providers = [counted(provider, partial(scratch, place=device)) for provider in providers]
        # Where budgets come from the memory in use, that includes the scratch memory of torch's own kernels.
        is_fixed = not settings.is_by_step and settings.total_workspace_size is None
        self._knows_columns = is_fixed and not self._counts and not device_of(device).uses_cudnn
        if self._knows_columns:
            providers = [counted(provider, columns_bytes) for provider in providers]
        self.offers = Offers(providers, device_of(device).uses_cudnn)

    def measurement(
        self,
        problem: ConvProblem,
        operands: Operands | None = None,
        strides: Shape | None = None,
        first: float | None = None,
    ) -> Measurement:
        """The known times of a problem under the present environment, and the means to measure the others.

        Args:
            problem: the convolution.
            operands: tensors to measure with, of which nothing is written; made up if not given.
            strides: of the result; those of the target among the operands if not given.
            first: seconds of a call of torch's own kernel with the operands, if that was timed.
        """
        current = Environment.current(self.device)
        if self._counts:  # the database keeps the workspaces with this scratch memory under another name
            current = replace(current, libraries=f"{current.libraries}, scratch of torch's own kernels counted")
        return Measurement(problem, Logbook(current, self._store), operands, strides, self.device, first)

    def search(self, measurement: Measurement, limit: float | None = None) -> Search:
        """The search for the fastest division of a problem within a limit.

        ``limit``: bytes of workspace; that of the settings if not given.
        """
        limit = self._settings.workspace_limit if limit is None else limit
        stock_workspace = scratch_of(measurement.problem, measurement.turn()) if self._counts else None
        avoids_stock = self.exceeds(measurement.problem, limit)
        if avoids_stock:
            stock_workspace = columns_bytes(measurement.problem)
        given = measurement, limit, self._settings, self.offers, self._experience, stock_workspace
        return Search(*given, avoids_stock=avoids_stock)

    def exceeds(self, problem: ConvProblem, limit: float | None = None) -> bool:
        """Whether torch's own kernel is known to exceed a limit on the whole, without a call of it.

        ``limit``: bytes of workspace; that of the settings if not given.
        """
        return self._knows_columns and columns_bytes(problem) > (
            self._settings.workspace_limit if limit is None else limit
        )

    @switching_often()
    def plan(self, measurement: Measurement, limit: float | None = None) -> Plan:
        """The fastest division of a problem within a limit, measured now as far as it is not known.

        Of the processes that share a board one measures, and all get its plan. One that lacks an algorithm of it warns,
        and plans for itself.

        ``limit``: bytes of workspace; that of the settings if not given.
        """
        problem, search = measurement.problem, self.search(measurement, limit)
        with progress.bar(None, f"{problem.direction} {problem}", self._settings.progress):
            if self._board is None:
                plan = plan_ahead(search)
            else:
                key = {**measurement.logbook.key(problem), "work": "plan", **search.terms}
                values = self._board.once(key, lambda: search.values(plan_ahead(search)))
                plan = search.plan_of(values) or _planned_anew(search, values)
        return plan


def _planned_anew(search: Search, posted: Mapping[str, Any]) -> Plan:
    """A plan of this process's own, with a warning, where it lacks algorithms of the plan that was posted for all.

    The others cannot be asked to do without these: some may have computed with the posted plan already.
    """
    lacking = sorted({algorithm for _, algorithm, *_ in posted["parts"]} - search.providers.keys())
    _log.warning(
        "%s of %s has a plan of this process's own, which lacks %s of the plan of the others: its results may be "
        "rounded differently from theirs",
        *(search.problem.direction, search.problem, ", ".join(lacking)),
    )
    return plan_ahead(search)
