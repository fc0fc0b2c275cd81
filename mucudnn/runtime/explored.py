"""Explores a convolution problem: calls of the program are trials of divisions until the best one is found."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from mucudnn.convolution.call import Call
from mucudnn.devices import Stopwatch
from mucudnn.devices.host import HostStopwatch
from mucudnn.optimizer import Exploration, Key, OverheadBudget, Trial
from mucudnn.planning.plan import Plan
from mucudnn.planning.search import Search
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.process import renewed, switching_often
from mucudnn.providers.provider import compute_dtype
from mucudnn.reporting.record import Record
from mucudnn.runtime.decision import Decision
from mucudnn.runtime.fixed import Fixed
from mucudnn.timing.schedule import LaunchError

WATCHED = 2
"""The number of calls by torch's own kernel that are timed before the first trial of a convolution. One is enough where
an earlier run has left times: these are in units of that kernel's."""

WORTH = 20
"""Trials of a convolution are prepared once its calls have taken so many times as long as the preparation will."""

MOST_REST = 15  # The most calls without a look at what may be tried.

PREPARING_SECONDS = 5e-3
"""The expected time of a preparation before any was timed."""


class LiveBudget:
    """The budget of all live planning of a session.

    Attributes:
        overhead: the budget of the trials' additional time, in seconds on the device.
        lock: protects all decisions of planning; no convolution runs under it.
        preparing: expected seconds of preparing the trials of a convolution.
    """

    def __init__(self) -> None:
        self.overhead = OverheadBudget()
        self.lock = renewed(threading.RLock())
        self.preparing = PREPARING_SECONDS

    def spent(self, watch: HostStopwatch) -> None:
        """Charges the time since a stopwatch was made, in which nothing of the program was computed."""
        with self.lock:
            self.overhead.count(0, watch.seconds())


class Explored(Decision):
    """The exploration of one problem, which several layers may share."""

    def __init__(self, budget: LiveBudget, search: Search, launches: dict[Key, list[float]]) -> None:
        """``launches``: times of the problem's launches, shared with its explorations within other limits."""
        self.problem = search.problem
        self._budget, self._search, self._launches = budget, search, launches
        self._device = search.measurement.device
        self._uncounted = 0  # Calls that have not earned anything yet.
        self._earned = 0  # Calls that have, before the exploration.
        self._stock: list[float] = []
        self._exploration: Exploration | None = None
        self._pending: list[tuple[Trial, Stopwatch]] = []
        self._runner = TrialRunner(search)
        recorded = search.recorded_plan()
        if recorded is not None:
            self._fix(recorded)

    @property
    def workspace(self) -> int:
        return 0 if self._exploration is None else self._exploration.launches.workspace

    def run(self, call: Call) -> torch.Tensor | None:
        rested, skipped = self._wake()
        if self.after is None:
            if self._device.is_capturing():
                return None
            if skipped:
                with self._budget.lock:
                    if self._exploration is None:
                        self._uncounted += skipped
                    else:
                        self._exploration.passed(skipped)
            if (result := self._explore(call)) is not None:
                return result
        if self.after is not None:
            return self.after.run(call)
        self.rest = self._resting = min(2 * rested + 1, MOST_REST)  # each look costs more than some trials
        return None

    @switching_often()
    def _explore(self, call: Call) -> torch.Tensor | None:
        """The result of a trial; `None` where no trial is due, or it fails and torch's own kernel may compute."""
        while self.after is None:
            watch = HostStopwatch()
            with self._budget.lock:
                trial = self._next()
            self._budget.spent(watch)
            if trial is None:
                break
            result = self._try(trial, call)
            if result is not None or not self._search.avoids_stock:
                return result
        return None

    def began(self, calls: int, watches: Sequence[Stopwatch]) -> None:
        """Notes the calls so far, which torch's own kernel has computed, and the stopwatches of some of them."""
        with self._budget.lock:
            if self.after is None:
                self._uncounted = calls - len(watches)
                self._pending += [(Trial(), watch) for watch in watches]

    def records(self) -> list[Record]:
        """The record of torch's own kernel, and of what was tried."""
        with self._budget.lock:
            exploration, stock = self._exploration, self._stock
            if exploration is None:
                return [replace(self._search.stock(min(stock)).record, leader="")] if stock else []
            return [self._search.so_far(exploration).record]

    def _next(self) -> Trial | None:
        """The trial of the next call; `None` if there is none now."""
        self._read()
        if self.after is not None or self._pending:
            return None
        if self._exploration is None:
            assumed = self._search.assumed_seconds
            if assumed is not None:
                self._stock = [assumed]
            elif len(self._stock) < (WATCHED if self._search.recollection.stock_seconds is None else 1):
                return Trial()
            self._consider(min(self._stock))
        exploration = self._exploration
        if exploration is None:
            return None
        trial = exploration.trial()
        if exploration.settled is not None:
            plan = self._search.found(exploration, exploration.settled)
            self._fix(plan)
            self._search.keep(plan, exploration)
        elif trial is None:
            exploration.passed()
        return trial

    def _consider(self, stock_seconds: float) -> None:
        """Begins the exploration once its preparation is granted."""
        overhead, preparing = self._budget.overhead, self._budget.preparing
        gain = (1 - self._search.recollection.best) * stock_seconds
        if not self._search.stock_fits:
            overhead = OverheadBudget(balance=math.inf)  # what keeps the limit may be slower
        self._earn(overhead, stock_seconds, self._uncounted)
        self._uncounted = 0
        if self._search.is_too_short(stock_seconds):
            self._fix(self._search.stock(stock_seconds))
        # A debt of others does not keep a convolution from what an earlier run has found.
        elif overhead.grants(preparing - gain, is_known=gain > 0):
            self._measure_speeds()
            watch = HostStopwatch()
            self._exploration = self._search.exploration(self._stock, overhead, self._launches)
            self._exploration.calls = self._earned
            self._budget.preparing = (preparing + watch.seconds()) / 2  # the latest counts half, earlier ones ever less
        else:
            self._earn(overhead, stock_seconds, 1)

    def _measure_speeds(self) -> None:
        """Beside other work this takes many times as long as it should: that must not keep trials from being made."""
        self._budget.overhead.count(0, -self._device.measure_speeds(compute_dtype(self.problem)))

    def _earn(self, overhead: OverheadBudget, seconds: float, calls: int) -> None:
        overhead.earn(seconds, calls, self._earned)
        self._earned += calls

    def _fix(self, plan: Plan) -> None:
        self.after = Fixed(plan, self._search.measurement.strides, self._device)

    def _read(self) -> None:
        """Learns from the calls that are done."""
        while self._pending:
            trial, watch = self._pending[0]
            laps = watch.laps()
            if laps is None:
                return
            del self._pending[0]
            if self._exploration is None:
                if not self._stock and self._device.is_deterministic:
                    # The next run is to compute the same, however far this one gets.
                    self._search.settle(self._search.stock(sum(laps)))
                self._stock.append(sum(laps))
                self._earn(self._budget.overhead, sum(laps), 1)
                self._measure_speeds()
            else:
                fresh = self._exploration.fresh(trial) if trial.by_launch else ()
                self._exploration.learn(trial, sum(laps), laps if trial.by_launch else ())
                known = self._exploration.launches.seconds
                found = {key: known[key][-1] for key in fresh if key in known}
                if found:
                    self._search.recollection.keep(self._exploration, found)  # the program may end at any time
                for key, seconds in found.items():
                    # Forecasts of other problems use it at once: where shapes change, few are explored to the end.
                    self._search.note(key, seconds)

    def _try(self, trial: Trial, call: Call) -> torch.Tensor | None:
        before = self._runner.checking
        try:
            result, watch = self._runner.run(trial, call.operands())
        except LaunchError as error:
            with self._budget.lock:
                if self._exploration is not None:
                    self._exploration.fail(trial, error.algorithm, error.extent)
            return None
        finally:
            with self._budget.lock:
                self._budget.overhead.count(0, self._runner.checking - before)
                if self._exploration is not None:
                    self._exploration.lost += self._runner.checking - before
        learning = HostStopwatch()
        with self._budget.lock:
            self._pending.append((trial, watch))
            if not self._device.is_asynchronous:
                self._read()
        self._budget.spent(learning)
        return result


def is_worth(calls: int, stock_seconds: float, preparing: float) -> bool:
    """Whether so many calls have taken long enough for preparing trials.

    About as many calls may be expected to come as there were so far. So a shape with only a few calls costs a program
    next to nothing.
    """
    return calls * stock_seconds >= WORTH * preparing
