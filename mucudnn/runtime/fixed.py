"""Computes the convolutions of one shape and direction by a plan."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch

from mucudnn.convolution.call import Call, Operands
from mucudnn.convolution.problem import Shape
from mucudnn.devices import Device
from mucudnn.planning.plan import Plan
from mucudnn.process import renewed, warn
from mucudnn.reporting.record import Record
from mucudnn.runtime.decision import Decision
from mucudnn.timing.schedule import LaunchError, Schedule, compare_results

MOST_ADOPTED = 4096

_log = logging.getLogger("mucudnn")


class Adopted:
    """Keeps the schedules that run on GPUs, as kernels of a schedule may wait in a stream after its last user is gone.

    Beyond `MOST_ADOPTED`, schedules without a user are dropped once the GPUs have done all their work."""

    def __init__(self) -> None:
        self._lock = renewed(threading.Lock())
        self._most = MOST_ADOPTED
        self.kept: list[tuple[weakref.ref[Fixed], Schedule, Device]] = []

    def add(self, user: Fixed, schedule: Schedule, device: Device) -> None:
        """Keeps a schedule of a user; if there are too many, waits for the devices and drops unused ones."""
        with self._lock:
            self.kept.append((weakref.ref(user), schedule, device))
            if len(self.kept) > self._most and not device.is_capturing():
                for one in {device for _, _, device in self.kept}:
                    one.finish()
                self.kept = [one for one in self.kept if _is_used(*one)]
                self._most = max(MOST_ADOPTED, 2 * len(self.kept))


def _is_used(user: weakref.ref[Fixed], schedule: Schedule, _: Device) -> bool:
    found = user()
    return found is not None and found.plan.schedule is schedule


adopted = Adopted()

captured: list[Schedule] = []
"""The schedules in CUDA graphs, kept as long as the process lives: torch does not report when a graph ends."""


class Fixed(Decision):
    """The plan of one shape and direction within a limit, and the next best plans if algorithms fail.

    Attributes:
        plan: how the convolutions are computed now.
        calls: how many convolutions it has computed.
        seen: seconds that they took, on devices whose work is done when a call returns.
    """

    plan: Plan

    def __init__(self, plan: Plan, strides: Shape, device: Device) -> None:
        """
        Args:
            strides: of what torch's own kernel returns, and so of the results.
            device: where the convolutions are computed.
        """
        self._empty, self._device, self._is_lasting = device.empty, device, device.is_asynchronous
        self._is_next_best = self._has_failed = False
        self._shape, self._strides = plan.problem.target_shape, strides
        self.calls, self.seen = 0, 0.0
        self._adopt(plan)

    def _adopt(self, plan: Plan) -> None:
        self.plan, self.is_left, self._is_captured = plan, plan.is_stock, False
        _log.info("%s of %s: %s", plan.problem.direction, plan.problem, plan.schedule.name)
        # A call reads neither the plan nor its schedule, which are in no cache of the processor by then.
        self._launch: Callable[[Operands], None] | None = None if plan.is_stock else plan.schedule.launch
        if self._is_lasting and not plan.is_stock:
            adopted.add(self, plan.schedule, self._device)

    @property
    def workspace(self) -> int:
        return self.plan.division.workspace

    def run(self, call: Call) -> torch.Tensor | None:
        """The call's result; an algorithm that fails is left out of the plan from then on, with one warning."""
        while (launch := self._launch) is not None:
            target = self._empty(self._shape, self._strides, call.input.dtype)
            if self._is_lasting and not self._is_captured and self._device.is_capturing():
                self._is_captured = True
                captured.append(self.plan.schedule)
            try:
                operands, began = call.operands(target), perf_counter()
                launch(operands)
                if not self._is_lasting:
                    self.seen += perf_counter() - began
                if self._is_next_best:
                    if self.plan.checks:
                        compare_results(self.plan.schedule, operands, None)  # memory may be short: a sample must do
                    self._is_next_best = False
                self.calls += 1
                return target
            except LaunchError as error:
                del target
                if not self._has_failed:
                    warn(f"{call.direction} of {self.plan.problem} goes on with the next best plan: {error}")
                self._has_failed = True
                self._adopt(self.plan.without(error))
                self._is_next_best = True
        return None

    def records(self) -> list[Record]:
        """The record of the plan."""
        return [replace(self.plan.record, calls=self.calls, seen=self.seen)]
