"""Session: the plans of one `patch`, each made when its convolution is first met."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Hashable

import torch

from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import ConvProblem, Shape
from mucudnn.planning.plan import Plan
from mucudnn.planning.planner import Planner
from mucudnn.providers import stock_result
from mucudnn.providers.cudnn.library import CudnnError
from mucudnn.reporting.record import Record
from mucudnn.reporting.run_file import Moment
from mucudnn.runtime.fixed_limit import Planned
from mucudnn.runtime.shared_total import Shared, Workspace
from mucudnn.runtime.step_budget import Allowance, Neutral
from mucudnn.settings import Settings
from mucudnn.timing.board import Board
from mucudnn.timing.environment import Environment
from mucudnn.timing.store import Store


class Session:
    """Settings, database and plans of one `patch`."""

    def __init__(self, settings: Settings, board: Board | None = None) -> None:
        """
        Args:
            board: where other processes with the same program post what they measure.
        """
        self.settings = settings
        self.decisions: dict[Hashable, Planned | Shared | Neutral | None] = {}
        """By the shim's key: None where torch's own kernel serves the convolution."""
        self.store = Store(settings.database)
        self._board = board
        self._planners: dict[torch.device, Planner | None] = {}
        self._lock = threading.Lock()
        self._plans: dict[Hashable, Plan | Planned | Shared | Neutral] = {}
        self._allowance = Allowance(settings) if settings.is_by_step else None
        total = settings.total_workspace_size
        self._workspace = None if total is None else Workspace(total)

    def decide(self, key: Hashable, call: Call) -> Planned | Shared | Neutral | None:
        """The entry of `decisions` for a call, made if it is the first with its key."""
        is_cuda = call.input.device.type == "cuda"
        if is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # nothing can be measured in a CUDA graph's capture; the next call outside is planned
        with self._lock:
            if key not in self.decisions:
                try:
                    self.decisions[key] = self._decision(call)
                except (torch.OutOfMemoryError, CudnnError) as error:
                    _warn(f"{call.direction} of a convolution is left to torch, as it could not be measured: {error}")
                    self.decisions[key] = None
            return self.decisions[key]

    def records(self) -> list[Record]:
        """What is decided for every convolution met so far, in that order."""
        with self._lock:
            plans = list(self._plans.values())
        return [record for plan in plans for record in plan.records()]

    def timeline(self) -> list[Moment]:
        """The memory of one step where budgets come from that; else empty."""
        return [] if self._allowance is None else self._allowance.timeline()

    def close(self) -> None:
        """Closes the database, and ends a recording that is going on."""
        if self._allowance is not None:
            self._allowance.close()
        self.store.close()

    def _decision(self, call: Call) -> Planned | Shared | Neutral | None:
        if self._allowance is not None:
            return self._neutral(self._allowance, call)
        return self._plan(call) if self._workspace is None else self._share(call)

    def _plan(self, call: Call) -> Planned | None:
        met = self._met(call)
        if met is None:
            return None
        problem, strides, planner = met
        plan = planner.plan(problem, Environment.current(call.input.device), call.operands(), strides)
        planned = Planned(plan, planner, strides)
        self._plans[problem] = plan if plan.is_stock else planned
        return None if plan.is_stock else planned

    def _neutral(self, allowance: Allowance, call: Call) -> Neutral | None:
        problem = call.problem()
        if problem is None or self._planner_for(call) is None:
            return None
        neutral = Neutral(allowance, problem, self._within)
        self._plans[neutral] = neutral
        return neutral

    def _within(self, call: Call, budget: int) -> Planned | None:
        """The best plan of a call within so many bytes, None where it cannot be measured."""
        with self._lock:
            met = self._met(call)
            assert met is not None, "it was met before"
            problem, strides, planner = met
            environment = Environment.current(call.input.device)
            try:
                plan = planner.plan(problem, environment, call.operands(), strides, limit=budget)
            except (torch.OutOfMemoryError, CudnnError) as error:
                _warn(f"{call.direction} of {problem} is left to torch, as it could not be measured: {error}")
                return None
            return Planned(plan, planner, strides)

    def _share(self, call: Call) -> Shared | None:
        assert self._workspace is not None
        with self._workspace.ledger.alone():
            met = self._met(call)
            if met is None:
                return None
            problem, strides, planner = met
            environment, limit = Environment.current(call.input.device), self.settings.workspace_limit
            stock = planner.measured(problem, environment, call.operands(), limit, strides)
        if len(stock.desirable()) == 1:
            self._plans[problem] = stock
            return None
        shared = Shared(self._workspace, stock, self._confirm)
        self._plans[shared] = shared  # layers of one problem may differ in their strides
        return shared

    def _confirm(self, call: Call, share: int) -> Planned | None:
        """The best plan of a call within a share, its division measured as a whole; None where that cannot be."""
        assert self._workspace is not None
        with self._lock, self._workspace.ledger.alone():
            met = self._met(call)
            assert met is not None, "it was met before"
            problem, strides, planner = met
            environment = Environment.current(call.input.device)
            try:
                plan = planner.plan(problem, environment, call.operands(), strides, limit=share)
            except (torch.OutOfMemoryError, CudnnError) as error:
                _warn(f"{call.direction} of {problem} is left to torch, as it could not be measured: {error}")
                return None
            return Planned(plan, planner, strides)

    def _met(self, call: Call) -> tuple[ConvProblem, Shape, Planner] | None:
        """The problem of a call, the strides that torch's own kernel gives its result, and who plans it.

        None if it is not divided.
        """
        unplanned = call.problem()
        planner = None if unplanned is None else self._planner_for(call)
        if unplanned is None or planner is None:
            return None
        result = stock_result(unplanned, call.operands())
        problem = call.problem(result)
        assert problem is not None
        return problem, result.stride(), planner

    def _planner_for(self, call: Call) -> Planner | None:
        """Who plans a call, None where it is left to torch."""
        device = call.input.device
        if self.settings.workspace_limit == 0 or (device.type == "cuda" and not call.is_for_cudnn()):
            return None
        return self._planner_on(device)

    def _planner_on(self, device: torch.device) -> Planner | None:
        """The planner of a device, None where its convolutions are left to torch."""
        if device not in self._planners:
            self._planners[device] = None
            try:
                self._planners[device] = Planner(self.settings, self.store, device=device, board=self._board)
            except RuntimeError as error:  # cuDNN cannot be used, or does not take the GPU
                _warn(f"convolutions on {device} are left to torch: {error}")
        return self._planners[device]


def _warn(what: str) -> None:
    warnings.warn(" ".join(f"mucudnn: {what}".split()), RuntimeWarning, stacklevel=2)
