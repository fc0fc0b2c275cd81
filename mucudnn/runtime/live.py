"""Live: convolutions whose calls are computed by what is tried, until the best is found."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

import torch

from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import Shape
from mucudnn.devices import Stopwatch, device_of
from mucudnn.optimizer import Exploration, Lessons, Purse, Trial
from mucudnn.planning.prospects import Prospects, is_too_short
from mucudnn.providers import stock_result
from mucudnn.reporting.record import Record
from mucudnn.runtime.fixed_limit import FixedLimit
from mucudnn.timing.schedule import LaunchError, Schedule

BASELINE_CALLS = 3
"""Calls of torch's own kernel before anything is tried: the first does more than the others."""

MOST_PREPARINGS = 101
"""Of so many convolutions it counts how long that took."""

PREPARING_SECONDS = 5e-3
"""What it takes to find out what there is to try, before that has been timed."""


class Budget:
    """What all live planning of a session may cost.

    Attributes:
        purse: seconds on the device.
        lock: of everything that planning decides; no convolution runs under it.
        lessons: what algorithms took for convolutions that are settled.
        preparing: seconds that it takes to find out what there is to try for a convolution.
    """

    def __init__(self, lessons: Lessons) -> None:
        self.purse = Purse()
        self.lock = threading.RLock()
        self.lessons = lessons
        self._preparing = deque([PREPARING_SECONDS], maxlen=MOST_PREPARINGS)

    @property
    def preparing(self) -> float:
        return statistics.median(self._preparing)

    def prepared(self, seconds: float) -> None:
        """Notes, and pays, what it took to find out what there is to try."""
        self._preparing.append(seconds)
        self.purse.count(0, seconds)


class Explored:
    """One problem, whatever layers call it.

    Attributes:
        fixed: what computes it from now on; `None` while that is being found out.
    """

    def __init__(self, budget: Budget, prospects: Prospects, strides: Shape) -> None:
        """
        Args:
            strides: of what torch's own kernel returns.
        """
        self.problem = prospects.problem
        self._budget, self._prospects, self._strides = budget, prospects, strides
        self._device = device_of(prospects.planner.device)
        self._stock: list[float] = []
        self._exploration: Exploration | None = None
        self._pending: list[tuple[Trial, Stopwatch]] = []
        self._schedules: dict[Hashable, Schedule] = {}
        self.fixed: FixedLimit | None = None
        kept = prospects.kept()
        if kept is not None:
            self.fixed = FixedLimit(kept, strides, self._device.is_asynchronous)

    def run(self, call: Call) -> torch.Tensor | None:
        """The call's result; `None` where torch's own kernel is to compute it."""
        if self.fixed is None:
            with self._budget.lock:
                trial = self._next()
            if trial is not None:
                return self._try(trial, call)
        return None if self.fixed is None else self.fixed.run(call)

    def began(self, watch: Stopwatch) -> None:
        """Notes the first call, which torch's own kernel has computed."""
        with self._budget.lock:
            if self.fixed is None:
                self._pending.append((Trial(), watch))

    def records(self) -> list[Record]:
        """What is found, or torch's own kernel while it is being looked for."""
        if self.fixed is not None:
            return self.fixed.records()
        with self._budget.lock:
            exploration, stock = self._exploration, self._stock
            if exploration is None:
                return [self._prospects.stock(min(stock)).record] if stock else []
            return [self._prospects.so_far(exploration).record]

    def _next(self) -> Trial | None:
        """What is to be tried; `None` for what computes it now."""
        self._read()
        if self.fixed is not None or self._pending:
            return None
        purse, exploration = self._budget.purse, self._exploration
        if exploration is None:
            if len(self._stock) < BASELINE_CALLS:
                return Trial()
            purse.count(min(self._stock))
            if is_too_short(min(self._stock)):
                self.fixed = FixedLimit(self._prospects.stock(min(self._stock)), self._strides)
            elif purse.grants(self._budget.preparing):
                self._prepare()
            return None
        trial = exploration.trial()
        if trial is None and exploration.settled is None:
            purse.count(exploration.baseline_seconds)
        self._settle(exploration)
        return trial

    def _prepare(self) -> None:
        start = time.perf_counter()
        self._exploration = self._prospects.exploration(self._stock, self._budget.purse, self._budget.lessons)
        self._budget.prepared(time.perf_counter() - start)

    def _settle(self, exploration: Exploration) -> None:
        if exploration.settled is not None and self.fixed is None:
            start = time.perf_counter()
            plan = self._prospects.found(exploration, exploration.settled)
            self.fixed = FixedLimit(plan, self._strides, self._device.is_asynchronous)
            self._prospects.teach(self._budget.lessons, self._prospects.keep(plan, exploration.launches))
            self._schedules.clear()
            self._budget.purse.count(0, time.perf_counter() - start)

    def _read(self) -> None:
        """Learns from the calls that are done."""
        while self._pending:
            trial, watch = self._pending[0]
            laps = watch.laps()
            if laps is None:
                return
            del self._pending[0]
            if self._exploration is None:
                self._stock.append(sum(laps))
                self._budget.purse.count(sum(laps))
            else:
                self._exploration.learn(trial, sum(laps), laps if trial.by_launch else ())

    def _try(self, trial: Trial, call: Call) -> torch.Tensor | None:
        watch = self._device.stopwatch()
        if trial.division is None:
            result = stock_result(self.problem, call.operands())
            watch.lap()
        else:
            result = call.input.new_empty_strided(self.problem.target_shape, self._strides)
            try:
                schedule = self._schedule(trial)
                schedule.run(call.operands(result), watch.lap if trial.by_launch else None)
            except LaunchError as error:
                with self._budget.lock:
                    if self._exploration is not None:
                        self._exploration.fail(trial, error.algorithm, error.extent)
                return None
            if not trial.by_launch:
                watch.lap()
        with self._budget.lock:
            self._pending.append((trial, watch))
            if not self._device.is_asynchronous:
                self._read()
        return result

    def _schedule(self, trial: Trial) -> Schedule:
        """What computes a trial, once it has been seen to keep the limit.

        Raises:
            LaunchError: where it does not.
        """
        assert trial.division is not None
        key = trial.dim, trial.division.runs()
        if key not in self._schedules:
            schedule = self._prospects.schedule(trial)
            # Parts at an edge, or at an odd address, may need more than others of their size.
            for option, workspace in zip(trial.division.options, schedule.workspaces, strict=True):
                if workspace > self._prospects.limit:
                    raise LaunchError(option.algorithm, option.extent, MemoryError("it needs more than the limit"))
            self._schedules[key] = schedule
        return self._schedules[key]


class Live:
    """The convolutions of one shape and direction. The first call is torch's own, which tells how results lie."""

    def __init__(self, meet: Callable[[Call, torch.Tensor], Explored], done: Callable[[], None]) -> None:
        """
        Args:
            meet: what explores the problem of a call, from the result that torch's own kernel gave.
            done: called once torch's own kernel has turned out to be the best.
        """
        self._meet, self._done = meet, done
        self._lock = threading.Lock()
        self._explored: Explored | None = None

    def run(self, call: Call) -> torch.Tensor | None:
        """The call's result; `None` where torch's own kernel is to compute it."""
        explored = self._explored
        if explored is None:
            if device_of(call.input.device).is_capturing():
                return None
            with self._lock:
                if self._explored is None:
                    return self._first(call)
                explored = self._explored
        if explored.fixed is not None:
            if explored.fixed.plan.is_stock:
                self._done()
            return explored.fixed.run(call)
        if device_of(call.input.device).is_capturing():
            return None
        return explored.run(call)

    def _first(self, call: Call) -> torch.Tensor:
        problem = call.problem()
        assert problem is not None, "others are torch's"
        watch = device_of(call.input.device).stopwatch()
        result = stock_result(problem, call.operands())
        watch.lap()
        explored = self._meet(call, result)
        explored.began(watch)
        self._explored = explored
        return result

    def records(self) -> list[Record]:
        """The records of what explores the problem."""
        return [] if self._explored is None else self._explored.records()
