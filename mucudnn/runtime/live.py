"""Plans convolutions while the program runs: their calls become trials of divisions, once that is worth its cost."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import ConvProblem
from mucudnn.devices import Stopwatch, device_of
from mucudnn.devices.host import HostStopwatch
from mucudnn.optimizer import Key
from mucudnn.planning.experience import Experience
from mucudnn.planning.outline import may_exceed, outline
from mucudnn.planning.plan import Plan
from mucudnn.planning.planner import Planner
from mucudnn.planning.search import is_too_short
from mucudnn.process import Recent, renewed
from mucudnn.providers import stock_call
from mucudnn.reporting.record import Record
from mucudnn.runtime.explored import WORTH, Explored, LiveBudget, is_worth
from mucudnn.settings import Settings
from mucudnn.timing.logbook import Environment

MOST_REST = 15  # The most calls without a look at what may be tried.

MOST_SHAPES = 4096
"""The most problems that are explored at once, and the most convolutions that are known to have been called once."""


class LivePlanning:
    """Makes the explorations of convolutions, within one limit or several.

    Attributes:
        budget: of all explorations.
        planner_for: finds the planner of a call; `None` where it is left to torch.
        called_once: the hashes of the keys of convolutions that torch has computed once before they are decided. The
            keys themselves, tuples of tuples, would make every garbage collection longer.
    """

    def __init__(
        self, settings: Settings, experience: Experience, planner_for: Callable[[Call], Planner | None]
    ) -> None:
        """``experience``: what earlier runs found."""
        self._is_chosen, self._limit = settings.planning == "live", settings.workspace_limit
        self.planner_for = planner_for
        self.budget, self._shapes = LiveBudget(), experience.shapes
        self._explored: Recent[Hashable, Explored] = Recent(MOST_SHAPES)
        self._launches: Recent[Hashable, dict[Key, list[float]]] = Recent(MOST_SHAPES)
        self.called_once: Recent[int, None] = Recent(MOST_SHAPES)

    def serves(self, device_type: str) -> bool:
        """Whether convolutions on such devices may be explored: on processors always, else if the user asks for it."""
        return self._is_chosen or device_type == "cpu"

    def reaches(self, device: torch.device) -> bool:
        """Whether the convolutions of a device are explored on their calls; otherwise they are measured ahead.

        Unless live planning is asked for, deterministic algorithms are measured ahead: the first run of a program is
        then to compute what all others compute.
        """
        return self.serves(device.type) and (self._is_chosen or not device_of(device).is_deterministic)

    def awaits(self, key: tuple[Any, ...], device: torch.device) -> bool:
        """Whether a convolution is decided only at its next call, so that torch computes this one.

        This is so for a first call that the database knows nothing about: a program may have new shapes at every step,
        and shapes that do not recur must cost next to nothing. What torch's own kernel may not compute within the limit
        is decided at once.
        """
        name = hash(key)
        if self._shapes or name in self.called_once or device_of(device).is_deterministic:
            return False
        if may_exceed(key[1], self._limit):
            return False
        self.called_once[name] = None
        return True

    def called(self, keys: Iterable[Hashable]) -> set[int]:
        """The convolutions, as the hashes of these keys and of those that were called once."""
        return self.called_once.keys() | set(map(hash, keys))

    def expects(self, call: Call) -> bool:
        """Whether the database may have something about a call's convolutions, so that the first call should look."""
        shapes = str(call.direction), tuple(call.input.shape), tuple(call.weight.shape)
        return shapes in self._shapes or device_of(call.input.device).is_deterministic

    def avoids_stock(self, call: Call, limit: float) -> bool:
        """Whether torch's own kernel is known to exceed a limit, so that not even the first call may be its own."""
        if limit == math.inf or (problem := call.problem()) is None or (planner := self.planner_for(call)) is None:
            return False
        return planner.exceeds(problem, limit)

    def explored(self, call: Call, result: torch.Tensor, limit: float) -> Explored | None:
        """The exploration of a call's problem within a limit, which several layers may share; `None` if torch keeps it.

        Args:
            result: of torch's own kernel.
            limit: bytes of workspace.
        """
        problem = call.problem(result)
        planner = None if problem is None else self.planner_for(call)
        if problem is None or planner is None:
            return None
        same = problem, result.stride(), planner.device, Environment.current(planner.device)
        watch = HostStopwatch()
        with self.budget.lock:
            if (same, limit) not in self._explored:
                if same not in self._launches:
                    self._launches[same] = {}
                search = planner.search(planner.measurement(problem, None, result.stride()), limit)
                explored = Explored(self.budget, search, self._launches[same])
                self._explored[same, limit] = explored
                self.budget.spent(watch)
            return self._explored[same, limit]


class Live:
    """The convolutions of one shape and direction.

    Until they are worth exploring, torch's own kernel computes them in the usual way, and only the second call is
    timed. Little is kept and done until then, as a program may have new shapes at every step.

    Attributes:
        rest: see `Decision`. While nothing can be tried, to call `run` each time would cost more than some trials.
    """

    __slots__ = (
        *("_avoids_stock", "_calls", "_explored", "_is_expected", "_is_left", "_limit", "_lock"),
        *("_planning", "_resting", "_seconds", "_timed", "_watch", "rest"),
    )

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
        self._explored: Explored | None = None
        self._is_left = False
        self.rest = self._resting = 0

    @property
    def is_left(self) -> bool:
        """Whether torch's own kernel computes the convolutions from now on."""
        plan = self.plan
        return self._is_left if plan is None else plan.is_stock

    @property
    def plan(self) -> Plan | None:
        """The settled plan; `None` before, and if the convolutions were not explored."""
        fixed = None if self._explored is None else self._explored.fixed
        return None if fixed is None else fixed.plan

    @property
    def workspace(self) -> int:
        """Bytes of workspace that a call may need now: those of the settled plan, or of any trial."""
        return 0 if self._explored is None else self._explored.workspace

    def run(self, call: Call) -> torch.Tensor | None:
        """The call's result; `None` where torch's own kernel is to compute it."""
        rested, skipped = self._resting, self._resting - self.rest
        self.rest = self._resting = 0
        if self._avoids_stock and self._explored is None:
            with self._lock:
                self._begin_without_stock(call)
        explored = self._explored
        if explored is None:
            self._calls += skipped
            return None if self._is_left else self._wait(call)
        if explored.fixed is not None:
            return explored.fixed.run(call)
        if device_of(call.input.device).is_capturing():
            return None
        if skipped:
            explored.passed(skipped)
        result = explored.run(call)
        if result is None and explored.fixed is None:
            self._rest(min(2 * rested + 1, MOST_REST))
        return result

    def _rest(self, calls: int) -> None:
        self.rest = self._resting = calls

    def _wait(self, call: Call) -> torch.Tensor | None:
        """Leaves a call to torch, or times it and may begin to explore."""
        self._calls += 1
        begins = self._is_expected or self._is_worth()
        if not begins and (self._calls == 1 or self._watch is not None):
            if self._seconds is not None:
                enough = math.ceil(WORTH * self._planning.budget.preparing / self._seconds)
                self._rest(max(0, min(enough - 1 - self._calls, self._calls)))
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
            if self._explored is None and (begins or self._is_worth()):
                self._begin(call, result, [*earlier, watch])
            else:
                self._timed = call.problem(result), self._planning.planner_for(call)
            return result
        finally:
            self._lock.release()

    def _begin_without_stock(self, call: Call) -> None:
        if self._explored is None and not self._is_left:
            result = outline(call)
            self._avoids_stock = result is not None
            if result is not None:
                self._begin(call, result, [])

    def _begin(self, call: Call, result: torch.Tensor, watches: Sequence[Stopwatch]) -> None:
        explored = self._planning.explored(call, result, self._limit)
        if explored is None:
            self._is_left = True
        else:
            explored.began(self._calls, watches)
            self._explored = explored

    def _is_worth(self) -> bool:
        if self._seconds is None:
            laps = None if self._watch is None else self._watch.laps()
            if laps is None:
                return False
            self._seconds = sum(laps)
            self._is_left = is_too_short(self._seconds)
        return is_worth(self._calls, self._seconds, self._planning.budget.preparing)

    def records(self) -> list[Record]:
        """The records of the exploration, or of torch's own kernel before that."""
        if self._explored is not None:
            return self._explored.records()
        problem, planner = self._timed
        if problem is None or planner is None or self._seconds is None:
            return []
        search = planner.search(planner.measurement(problem), self._limit)
        return [replace(search.stock(self._seconds).record, leader="")]
