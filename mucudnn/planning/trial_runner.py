"""Runs and times the trials of one problem, and checks the results."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from dataclasses import replace

import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import Dim, Role
from mucudnn.convolution.tile import tile
from mucudnn.convolution.verdict import LEAST, SAMPLE
from mucudnn.devices import Stopwatch
from mucudnn.devices.host import HostStopwatch
from mucudnn.optimizer import Division, Option, Trial
from mucudnn.planning.search import Search
from mucudnn.providers import STOCK, stock_result
from mucudnn.timing.schedule import LaunchError, Schedule, WrongResult, compare_results


class TrialRunner:
    """Computes the trials of a problem, and checks the result of each division at its first trial."""

    def __init__(self, search: Search) -> None:
        self._search, self._strides = search, search.measurement.strides
        self._device = search.measurement.device
        self._schedules: dict[Hashable, Schedule] = {}
        self._right, self._checked = set[str](), search.measurement.logbook.right(search.problem)
        self._peer: Schedule | None = None
        self._least_seconds = math.inf
        self.checking = 0.0  # Seconds that the checks have taken so far.

    def run(self, trial: Trial, given: Operands) -> tuple[torch.Tensor, Stopwatch]:
        """The problem's result by a trial, and the stopwatch of the call.

        ``given``: the operands; they are only read.

        Raises:
            LaunchError: where an algorithm fails, computes something wrong, or would exceed the limit.
        """
        problem, watch = self._search.problem, self._device.stopwatch()
        if trial.division is None:
            result = stock_result(problem, given)
            watch.lap()
            return result, watch
        result = given.w.new_empty_strided(problem.target_shape, self._strides)
        operands = replace(given, **{str(problem.target): result})
        schedule = self._schedule(trial)
        start = time.perf_counter()
        schedule.run(operands, watch.lap if trial.by_launch else None)
        seconds = time.perf_counter() - start
        if not trial.by_launch:
            watch.lap()
        if self._search.settings.check and schedule.name not in self._right:
            self._check(schedule, operands, seconds)
        return result, watch

    def _check(self, schedule: Schedule, operands: Operands, seconds: float) -> None:
        """Compares a result with a second one where an algorithm computes along a dim for the first time, in this run
        or an earlier one, else a sample of it with float64.

        ``seconds``: that the result took.

        Raises:
            WrongResult: where an algorithm computed something wrong.
        """
        watch = HostStopwatch()
        used = {key[:2] for key in schedule.division.keys if key[1] != STOCK}
        # Where budgets come from a step's memory, no second result may be kept, and where torch's own kernel exceeds
        # the limit, it may not compute one: a sample must do.
        is_new = not used <= self._checked
        compares = is_new and not self._search.settings.is_by_step and not self._search.avoids_stock
        alone = self._alone(schedule, operands) if compares and self._peer is None else None
        other, by = self._second_result(operands) if compares and alone is None else (None, STOCK)
        found: dict[str, str] | None = None
        try:
            found = compare_results(schedule, operands, other, by, SAMPLE if is_new else LEAST)
            if alone is not None and found is not None:
                found |= compare_results(*alone) or {}
            if found is not None:
                self._checked |= used
                if compares:
                    self._search.measurement.logbook.note_right(schedule.problem, used)
                self._right.add(schedule.name)
                self._offer_peer(schedule, seconds)
        except WrongResult as error:
            found = dict(error.faults)
            self._peer = None
            raise
        finally:
            if found:
                self._search.measurement.logbook.note_wrong(schedule.problem, found)
            self.checking += watch.seconds()

    def _alone(self, schedule: Schedule, operands: Operands) -> tuple[Schedule, Operands, torch.Tensor] | None:
        """The first part with the result of torch's own kernel for it, if that kernel has computed all the others, so
        that the part alone is to be compared; `None` otherwise, and where the parts are summed."""
        problem, (first, *rest) = schedule.problem, schedule.division.options
        if problem.target is Role.W or first.algorithm == STOCK or {option.algorithm for option in rest} != {STOCK}:
            return None
        part, providers = tile(problem, Dim(schedule.division.dim), 0, first.extent).part(operands), schedule.providers
        own, stock = (
            Schedule(part.problem, Division((Option(part.problem.extent, name, 0.0, 0),)), providers)
            for name in (first.algorithm, STOCK)
        )
        other = torch.empty_like(part.result)
        apart: Operands = replace(part, **{str(problem.target): other})  # type: ignore[arg-type]
        stock.run(apart)
        return own, part, other

    def _second_result(self, operands: Operands) -> tuple[torch.Tensor, str]:
        """A second result of the operands, and the algorithm that computed it.

        The fastest schedule that was right before computes it, since torch's own kernel may take a hundred times as
        long. Until there is a faster one, it is torch's own.
        """
        problem = self._search.problem
        if self._peer is not None:
            result = torch.empty_like(operands.target(problem))
            try:
                self._peer.run(replace(operands, **{str(problem.target): result}))
                return result, self._peer.division.options[0].algorithm
            except LaunchError:  # no fault of the trial; it is reported where the peer itself is tried or used
                self._peer = None
        start = time.perf_counter()
        result = stock_result(problem, operands)
        self._least_seconds = time.perf_counter() - start
        return result, STOCK

    def _offer_peer(self, schedule: Schedule, seconds: float) -> None:
        """Makes a schedule that was right the peer of others, if it has one algorithm, and is the fastest yet."""
        (algorithm, _), *others = schedule.division.runs()
        # The time of what a device has only queued is not known yet.
        if seconds < self._least_seconds and not others and algorithm != STOCK and not self._device.is_asynchronous:
            self._peer, self._least_seconds = schedule, seconds

    def laps(self, trial: Trial, given: Operands) -> list[float]:
        """The times by which a trial is judged, in seconds, once they are known. Raises LaunchError as `run`."""
        _, watch = self.run(trial, given)
        while (laps := watch.laps()) is None:
            time.sleep(1e-4)
        return laps

    def _schedule(self, trial: Trial) -> Schedule:
        """The schedule of a trial, once it is known to keep the limit. Raises LaunchError where it does not."""
        assert trial.division is not None
        key = trial.division.keys
        if key not in self._schedules:
            schedule = Schedule(self._search.problem, trial.division, self._search.providers)
            # Parts at an edge, or at an odd address, may need more than others of their size.
            for option, workspace in zip(trial.division.options, schedule.workspaces(), strict=True):
                if workspace > self._search.limit:
                    raise LaunchError(option.algorithm, option.extent, MemoryError("it needs more than the limit"))
            self._schedules[key] = schedule
        return self._schedules[key]
