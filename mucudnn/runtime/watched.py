"""Watches the first calls of convolutions, until it is worth its cost to explore them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import ConvProblem
from mucudnn.devices import Stopwatch, device_of
from mucudnn.planning.outline import outline
from mucudnn.planning.planner import Planner
from mucudnn.planning.search import is_too_short
from mucudnn.process import renewed
from mucudnn.providers import stock_call
from mucudnn.reporting.record import Record
from mucudnn.runtime.decision import Decision
from mucudnn.runtime.explored import WORTH, is_worth
from mucudnn.runtime.live import LivePlanning


class Watched(Decision):
    """Convolutions that torch's own kernel computes in the usual way; only the second call is timed.

    Little is kept and done, as a program may have new shapes at every step.
    """

    def __init__(self, planning: LivePlanning, call: Call, limit: float, calls: int = 0) -> None:
        """
        Args:
            planning: that of the session.
            call: one of the convolutions.
            limit: bytes of workspace.
            calls: that torch has computed before.
        """
        self._planning, self._limit, self._calls = planning, limit, calls
        self._is_expected = planning.expects(call)
        # Torch's own kernels of earlier calls were found, by shapes alone, to keep the limit.
        self._avoids_stock = not calls and planning.avoids_stock(call, limit)
        self._lock = renewed(threading.Lock())
        self._watch: Stopwatch | None = None  # of the second call: the first does more than the others
        self._seconds: float | None = None
        self._timed: tuple[ConvProblem | None, Planner | None] = None, None

    def run(self, call: Call) -> torch.Tensor | None:
        self._calls += self._wake()[1]
        if self._avoids_stock:
            with self._lock:
                result = None if self.after is not None or self.is_left else outline(call)
                self._avoids_stock = result is not None
                if result is not None:
                    self._begin(call, result, [])
        if self.after is not None:
            return self.after.run(call)
        return None if self.is_left else self._wait(call)

    def _wait(self, call: Call) -> torch.Tensor | None:
        """Leaves a call to torch, or times it and may begin to explore."""
        self._calls += 1
        begins = self._is_expected or self._is_worth()
        if not begins and (self._calls == 1 or self._watch is not None):
            if self._seconds is not None:
                enough = math.ceil(WORTH * self._planning.budget.preparing / self._seconds)
                self.rest = self._resting = max(0, min(enough - 1 - self._calls, self._calls))
            return None
        device = device_of(call.input.device)
        if device.is_capturing() or not self._lock.acquire(blocking=False):
            return None
        try:
            watch = device.stopwatch()
            result = stock_call(call)
            watch.lap()
            earlier = [] if self._watch is None else [self._watch]
            self._watch = watch
            if self.after is None and (begins or self._is_worth()):
                self._begin(call, result, [*earlier, watch])
            else:
                self._timed = call.problem(result), self._planning.planner_for(call)
            return result
        finally:
            self._lock.release()

    def _begin(self, call: Call, result: torch.Tensor, watches: Sequence[Stopwatch]) -> None:
        explored = self._planning.explored(call, result, self._limit)
        self.is_left = explored is None
        if explored is not None:
            explored.began(self._calls, watches)
            self.after = explored

    def _is_worth(self) -> bool:
        if self._seconds is None:
            laps = None if self._watch is None else self._watch.laps()
            if laps is None:
                return False
            self._seconds = sum(laps)
            self.is_left = is_too_short(self._seconds)
        return is_worth(self._calls, self._seconds, self._planning.budget.preparing)

    def records(self) -> list[Record]:
        """The record of torch's own kernel, once it was timed."""
        problem, planner = self._timed
        if problem is None or planner is None or self._seconds is None:
            return []
        search = planner.search(planner.measurement(problem), self._limit)
        return [replace(search.stock(self._seconds).record, leader="")]
