"""Computes each convolution within the memory that a training step leaves free at its moment, below the step's peak."""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager

import torch

from mucudnn.budgets.memory import recorder
from mucudnn.budgets.steps import Steps
from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.devices import device_of
from mucudnn.optimizer import StepTimeline
from mucudnn.process import renewed
from mucudnn.reporting.record import Moment
from mucudnn.runtime.decision import ByBytes, Decide
from mucudnn.settings import Settings
from mucudnn.sizes import PEAK


class Allowance:
    """The bytes of workspace that the memory of the program's training steps leaves for each call, per device."""

    def __init__(self, settings: Settings, planning: AbstractContextManager[object]) -> None:
        """With the lock of the thread that plans."""
        self.planning = planning
        self.limit = math.inf if settings.memory_limit is None else settings.memory_limit
        self._settings = settings
        self._lock = renewed(threading.Lock())
        self._steps: dict[torch.device, Steps] = {}
        self._gradient: tuple[int, int] | None = None

    def bytes(self, decision: StepBudget, call: Call) -> int | None:
        """Bytes that the call may use; `None` while they are not known."""
        with self._lock:
            device = call.input.device
            if device not in self._steps:
                self._steps[device] = Steps(recorder(device_of(device)), self._budgets)
            size = _result_bytes(call)
            # Torch computes both gradients in one call: the input's is alive while the weight's is computed.
            gradient = None if call.grad_output is None else (call.grad_output.data_ptr(), call.input.data_ptr())
            if call.direction is Direction.BACKWARD_FILTER and gradient == self._gradient:
                size += call.input.numel() * call.input.element_size()
            self._gradient = gradient if call.direction is Direction.BACKWARD_DATA else None
            return self._steps[device].call(decision, call.direction is Direction.FORWARD, size)

    def timeline(self) -> list[Moment]:
        """The calls of the recorded step that the program went through last, on the device that it used first."""
        with self._lock:
            for steps in self._steps.values():
                if (step := steps.last) is not None:
                    moments = zip(step.calls, step.timeline.live, step.budgets, strict=True)
                    return [decision.moment(live, budget) for decision, live, budget in moments]  # type: ignore[attr-defined]
        return []

    def close(self) -> None:
        """Ends recordings that are going on."""
        with self._lock:
            for steps in self._steps.values():
                steps.close()

    def _budgets(self, timeline: StepTimeline) -> tuple[int, ...]:
        found = timeline.budgets(self.limit)
        if self._settings.workspace_limit is PEAK:
            return tuple(map(min, found, timeline.budgets()))
        return tuple(int(min(budget, self._settings.workspace_limit)) for budget in found)


class StepBudget(ByBytes):
    """The convolutions of one shape and direction, each call with the budget of its place in the step."""

    def __init__(self, allowance: Allowance, problem: ConvProblem, decide: Decide) -> None:
        """``problem``: as far as it is known before it was computed, for its name."""
        super().__init__(allowance.planning, decide)
        self._allowance = allowance
        self._name = f"{problem.direction} {problem}"

    def run(self, call: Call) -> torch.Tensor | None:
        budget, device = self._allowance.bytes(self, call), device_of(call.input.device)
        # Nothing can be measured in a CUDA graph's capture.
        if not budget or (budget not in self.made and device.is_capturing()):
            return None
        chosen = self.within(budget, call)
        if chosen is None:
            return None
        if self._allowance.limit < math.inf:  # more may be alive than when the step was recorded
            needed = device.bytes_in_use() + _result_bytes(call) + chosen.workspace
            if needed > self._allowance.limit:
                return None
        if call.before is not None:
            call.before()
        return chosen.run(call)

    def moment(self, live: int, budget: int) -> Moment:
        """A call in the recorded step."""
        chosen = self.made.get(budget)
        plan = None if chosen is None else chosen.latest.plan
        workspace = 0 if plan is None else plan.division.workspace
        return Moment(self._name, live, workspace, budget)


def _result_bytes(call: Call) -> int:
    problem = call.problem()
    assert problem is not None, "others are torch's"
    return math.prod(problem.target_shape) * problem.element_bytes
