"""Planner: finds the fastest measured division of a problem within a limit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mucudnn.convolution.operands import Operands
from mucudnn.convolution.problem import ConvProblem, Shape
from mucudnn.devices import device_of
from mucudnn.planning.ahead import plan_ahead
from mucudnn.planning.counted import HOST, counted, counting, scratch_of
from mucudnn.planning.experience import Experience
from mucudnn.planning.offers import Offers
from mucudnn.planning.plan import Plan
from mucudnn.planning.search import Search
from mucudnn.providers import Compiling, Provider, providers_on
from mucudnn.settings import Settings
from mucudnn.timing import progress
from mucudnn.timing.board import Board
from mucudnn.timing.environment import Environment
from mucudnn.timing.logbook import CompiledPlans, Logbook
from mucudnn.timing.measurement import Measurement
from mucudnn.timing.store import Store

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
            experience: that others share; what the database tells, if not given.

        Raises:
            Unavailable: where cuDNN cannot be used, for a GPU.
        """
        self.device = device
        self._settings, self._store, self._board = settings, store, board
        self._experience = experience or Experience(store)
        providers = providers_on(device, settings.engines) if providers is None else providers
        for provider in providers:
            if isinstance(provider, Compiling):
                provider.archive = CompiledPlans(store, device_of(device)) if store.persistent else None
        self._counts = settings.count_stock
        if self._counts:
            providers = [counted(provider, device) for provider in providers]
        self.offers = Offers(providers, device_of(device).uses_cudnn)
        wanted = settings.benchmark_devices
        alone = replace(settings, benchmark_devices=None)
        self._peers = [
            Planner(alone, store, device=peer, experience=self._experience)
            for peer in (() if wanted is None else device_of(device).peers(wanted))
        ]

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
        logbook = Logbook(counting(current) if self._counts else current, self._store)
        return Measurement(problem, logbook, operands, strides, self.device, first)

    def search(self, measurement: Measurement, limit: float | None = None) -> Search:
        """The search for the fastest division of a problem within a limit.

        Args:
            limit: bytes of workspace; that of the settings if not given.
        """
        limit = self._settings.workspace_limit if limit is None else limit
        held = scratch_of(measurement.problem, measurement.turn()) if self._counts else None
        peers = tuple(peer.search(measurement.elsewhere(peer.device), limit) for peer in self._peers)
        return Search(measurement, limit, self._settings, self.offers, self._experience, held, peers)

    def plan(self, measurement: Measurement, limit: float | None = None) -> Plan:
        """The fastest division of a problem within a limit, measured now as far as it is not known.

        Of the processes that share a board one measures, and all get its plan. One that lacks an algorithm of it warns,
        and plans for itself.

        Args:
            limit: bytes of workspace; that of the settings if not given.
        """
        problem, search = measurement.problem, self.search(measurement, limit)
        with progress.bar(None, f"{problem.direction} {problem}", self._settings.progress):
            if self._board is None:
                plan = plan_ahead(search)
            else:
                key = {**measurement.logbook.key(problem), "extent": problem.extent, "work": "plan", **search.terms}
                values = self._board.once(key, lambda: search.values(plan_ahead(search)))
                plan = search.plan_of(values) or _planned_anew(search, values)
        _log.info("%s %s: %s %s", problem.direction, problem, plan.dim, plan.division.runs())
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
