"""The session of one `patch`: it decides for each convolution, when that is first called, how it is computed."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mucudnn.convolution.call import Call
from mucudnn.devices import allocations, device_of
from mucudnn.planning.experience import Experience
from mucudnn.planning.outline import outline
from mucudnn.planning.planner import Planner
from mucudnn.process import Recent, renewed, warn
from mucudnn.providers import stock_result
from mucudnn.providers.cudnn.library import CudnnError
from mucudnn.providers.stock import columns_bytes
from mucudnn.reporting.record import Moment, Outcome, Record
from mucudnn.runtime.absence import Absence
from mucudnn.runtime.decision import Decision
from mucudnn.runtime.fixed import Fixed
from mucudnn.runtime.live import LivePlanning
from mucudnn.runtime.shared_total import SharedTotal, Workspace
from mucudnn.runtime.step_budget import Allowance, StepBudget
from mucudnn.runtime.watched import Watched
from mucudnn.settings import Settings
from mucudnn.sizes import format_bytes
from mucudnn.timing.board import Board
from mucudnn.timing.store import Store

MOST_SHAPES = 4096
"""Convolutions of so many shapes and directions are decided at once, and reported: a program whose shapes keep changing
has the decisions that were made first made anew, from the database, where it calls their shapes again."""

UNDECIDED: Any = object()  # Represents a decision that is still to be made.

_WORTH_A_LINE = 1 << 20  # Bytes outside torch's allocator.

_log = logging.getLogger("mucudnn")


class Session:
    """The settings, the database and the decisions of one `patch`.

    One thread at a time plans, under the lock `_planning`. It may wait for bytes of the ledger or for another process,
    so a thread takes this lock only while it has no bytes and no other lock: see docs/architecture.md.
    """

    def __init__(self, settings: Settings, board: Board | None = None) -> None:
        """``board``: on which other processes with the same program post their measurements."""
        self.settings = settings
        self.decisions: Recent[Hashable, Decision | None] = Recent(MOST_SHAPES)
        """The decisions by the shim's key: None where torch's own kernel computes the convolution."""
        self.store = Store(settings.database)
        self._board, self.has_board = board, board is not None
        self._planners: dict[torch.device, Planner | None] = {}
        self._outside: dict[torch.device, int] = {}
        """Bytes of each GPU outside torch's allocator before anything was planned for it."""
        self._planning = renewed(threading.RLock())
        self._lock = renewed(threading.Lock())
        # Also those for torch's own kernel, in the order of the first calls.
        self._made: Recent[Hashable, Decision] = Recent(MOST_SHAPES)
        self._allowance = Allowance(settings, self._planning) if settings.is_by_step else None
        total = settings.total_workspace_size
        self._workspace = None if total is None else Workspace(total, self._planning)
        self._is_by_convolution = self._allowance is None and self._workspace is None
        self.notices: list[str] = []  # Notices to the user about the settings, a sentence each.
        if board is not None and not self._is_by_convolution:
            what = "the total is" if self._allowance is None else "budgets by step are"
            self.notices = [
                f"{what} separate on each rank: torch's own kernels compute what several ranks compute on the same data"
            ]
            _log.info(self.notices[0])
        self._experience, is_live = Experience(self.store), settings.planning != "ahead"
        self._live = LivePlanning(settings, self._experience, self._planner_for) if is_live else None
        self._left: weakref.WeakKeyDictionary[object, tuple[Mapping[Hashable, float] | None, float]]
        self._left = weakref.WeakKeyDictionary()  # What plans have left by `leave`.
        self.is_by_work = self.has_board and (self._live is not None or not self._is_by_convolution)
        """Whether local work is decided apart from what several processes compute on the same data."""
        is_free = self._live is not None and self._is_by_convolution and board is None and not settings.has_limit
        self.absence = Absence(self.decisions, is_free)

    def marks_local_work(self, device_type: str) -> bool:
        """Whether plans on such devices depend on which convolutions are local work."""
        is_served = not self._is_by_convolution or (self._live is not None and self._live.serves(device_type))
        return self.has_board and is_served

    def awaits(self, key: tuple[Any, ...], device: torch.device) -> bool:
        """Whether a convolution is decided only at its next call, so that torch computes this one.

        This is so under live planning alone, in one process: budgets and totals count every call, and all ranks must
        count the same."""
        live = self._live
        if live is None or not self._is_by_convolution or self._board is not None:
            return False
        return live.reaches(device) and live.awaits(key, device)

    def decide(self, key: tuple[Any, ...], call: Call) -> Decision | None:
        """The entry of `decisions` for a call, made if it is the first with its key."""
        # Not measured in a CUDA graph's capture, nor counted under a profiler: the next call outside is planned.
        if device_of(call.input.device).is_capturing() or (self.settings.count_stock and not allocations.can_profile()):
            return None
        with self._planning:
            if key not in self.decisions:
                decision = self._decision(key, call)
                if decision is not None:  # convolutions with the same plan are reported once
                    self._made[key if decision.plan is None else decision.plan.problem] = decision
                self.decisions[key] = None if decision is None or decision.is_left else decision
            return self.decisions[key]

    def result(self, decision: Any, key: tuple[Any, ...], call: Call) -> torch.Tensor | None:
        """The result of a call by its decision, which is made now if it is `UNDECIDED`; `None` where torch computes it.

        The state that the decision has come to takes its place.
        """
        if decision is UNDECIDED:
            decision = self.decide(key, call)
        if decision is None:
            return None
        result: torch.Tensor | None = decision.run(call)
        if result is not None:
            self.absence.is_busy = True
        if decision.after is not None or decision.is_left:
            now = decision.latest
            with self._lock:
                if self.decisions.get(key) is decision:  # `leave` may have ended it
                    self.decisions[key] = None if now.is_left else now
        return result

    def leave(self, plan: object, left: Mapping[Hashable, float] | None, others: float) -> None:
        """Bounds workspaces, beside the limits of the settings, by what a plan of the program's memory leaves for them,
        besides the columns of torch's own kernels. Budgets by step have a plan of their own.

        Args:
            plan: as long as it is alive, and until it leaves something else, its bounds count.
            left: bytes by `Call.kind`; None: the plan does not know the kinds of its convolutions.
            others: bytes for convolutions of kinds that no plan knows; of all kinds where this plan knows none.
        """
        with self._planning:
            is_less = left is None or others < self._least_left(None)
            is_less = is_less or any(size < self._least_left(kind) for kind, size in (left or {}).items())
            self._left[plan] = left, others
            if is_less:
                with self._lock:
                    self.decisions.clear()

    def _least_left(self, kind: Hashable) -> float:
        """The least that a plan leaves for convolutions of a kind; `math.inf` without plans."""
        plans = list(self._left.values())
        known = [others if left is None else left[kind] for left, others in plans if left is None or kind in left]
        return min(known or [others for _, others in plans], default=math.inf)

    def _limit_of(self, call: Call) -> float:
        """The bytes of workspace that a call may use at any moment."""
        limit, least = self.settings.workspace_limit, self._least_left(call.kind) if self._left else math.inf
        if least < limit and (problem := call.problem()) is not None:
            least += columns_bytes(problem)
        return min(limit, least)

    def records(self) -> list[Record]:
        """The records of all convolutions called so far, in that order; where planned live, of all timed ones."""
        records = [record for decision in list(self._made.values()) for record in decision.latest.records()]
        if self._live is not None and self._is_by_convolution:  # layers that explore a problem together all report it
            records = list({replace(record, calls=0, seen=0.0): record for record in records}.values())
        return records

    def timeline(self) -> list[Moment]:
        """The memory of one step where budgets come from that; else empty."""
        return [] if self._allowance is None else self._allowance.timeline()

    def outcome(self) -> Outcome:
        """All of it, as `run --report` writes it."""
        called = set(map(hash, list(self.decisions))).union(() if self._live is None else self._live.called_once)
        notices = [*self.notices, *self.absence.notices(), *self._taken_outside()]
        return Outcome(self.records(), self.timeline(), notices, len(called))

    def _taken_outside(self) -> list[str]:
        """The memory of GPUs that planning and algorithms have taken outside torch's allocator, a sentence each."""
        taken = {device: device_of(device).outside() - before for device, before in self._outside.items()}
        return [
            f"since the first plan {format_bytes(count)} more of {device_of(device).name} are in use outside torch's"
            " allocator: code of kernels, what cuDNN keeps, and other processes"
            for device, count in taken.items()
            if count >= _WORTH_A_LINE
        ]

    def close(self) -> None:
        """Closes the database, and ends a recording that is going on."""
        if self._allowance is not None:
            self._allowance.close()
        self.store.close()

    def _decision(self, key: tuple[Any, ...], call: Call) -> Decision | None:
        device, live, is_by_work = call.input.device, self._live, self.is_by_work
        direction, (*looks, is_local_work) = key
        # The share of a convolution depends on all others.
        is_bound = not self._is_by_convolution and device_of(device).is_deterministic
        if live is not None and (is_bound or not live.reaches(device)):
            live = None
        within: Callable[[Call, float], Decision | None] = self._planned if live is None else partial(Watched, live)
        is_common = is_by_work and not is_local_work
        if not self._is_by_convolution and is_common:
            return None  # Processes may decide differently: what several compute on the same data is torch's.
        if self._allowance is not None:
            problem = None if self._planner_for(call) is None else call.problem()
            return None if problem is None else StepBudget(self._allowance, problem, within)
        if self._workspace is not None:
            limit = min(self._limit_of(call), self._workspace.ledger.total)
            whole = within(call, limit)
            return whole if whole is None or whole.is_left else SharedTotal(self._workspace, whole, limit, within)
        if live is None and is_local_work:
            return self.decide((direction, (*looks, False)), call)
        limit = self._limit_of(call)
        if live is None or is_common:
            return self._planned(call, limit)
        return Watched(live, call, limit, int(hash(key) in live.called_once))

    def _planned(self, call: Call, limit: float) -> Fixed | None:
        """The best plan of a call within ``limit`` bytes of workspace, measured ahead; `None` for a call that is not
        divided or cannot be measured."""
        with self._planning, nullcontext() if self._workspace is None else self._workspace.ledger.alone():
            unplanned = call.problem()
            planner = None if unplanned is None else self._planner_for(call)
            if unplanned is None or planner is None:
                return None
            try:
                start = time.perf_counter()
                result = outline(call) if planner.exceeds(unplanned, limit) else None
                if result is None:
                    result = stock_result(unplanned, call.operands())
                seconds = None if device_of(planner.device).is_asynchronous else time.perf_counter() - start
                problem = call.problem(result)
                assert problem is not None
                measurement = planner.measurement(problem, call.operands(), result.stride(), seconds)
                del result  # measuring is to use no more memory than the program would
                plan = planner.plan(measurement, limit)
            except RuntimeError as error:
                if not (isinstance(error, CudnnError) or allocations.is_out_of_memory(error)):
                    raise
                warn(f"{call.direction} of {unplanned} is left to torch, as it could not be measured: {error}")
                return None
            if plan.record.workspace > plan.record.limit:  # of torch's own kernel, where that counts
                warn(plan.record.excess)
            return Fixed(plan, measurement.strides, measurement.device)

    def _planner_for(self, call: Call) -> Planner | None:
        """The planner of a call; None if the call is left to torch."""
        device = call.input.device
        if self.settings.workspace_limit == 0 or (device_of(device).uses_cudnn and not call.is_for_cudnn()):
            return None
        with self._lock:
            if device not in self._planners:
                self._planners[device] = None
                self._outside[device] = device_of(device).outside()
                try:
                    self._planners[device] = Planner(
                        self.settings, self.store, None, device, self._board, self._experience
                    )
                except RuntimeError as error:  # cuDNN cannot be used, or does not take the GPU
                    warn(f"convolutions on {device} are left to torch: {error}")
            return self._planners[device]
