"""Planned: a convolution that the program has met, with its plan at work."""

from __future__ import annotations

import warnings

import torch

from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import Shape
from mucudnn.planning.plan import Plan
from mucudnn.planning.planner import Planner
from mucudnn.providers import stock_result
from mucudnn.reporting.record import Record
from mucudnn.timing.schedule import LaunchError, Schedule

_adopted: list[Schedule] = []
"""What GPUs were given to run, for as long as the process lives: when nothing needs a schedule any more, kernels of its
plans may still wait in a stream, or be part of a CUDA graph. Schedules share the plans that they have in common."""


class Planned:
    """A convolution that the program has met, and how it is computed now."""

    def __init__(self, plan: Plan, planner: Planner, strides: Shape) -> None:
        """
        Args:
            strides: of what torch's own kernel returns, and so of the results.
        """
        self._providers = planner.providers(plan.problem)
        self._on_gpu = planner.device.type == "cuda"
        self._strides = strides
        self._warned = False
        self._adopt(plan)

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        self._schedule = None if plan.is_stock else Schedule(plan.problem, plan.dim, plan.division, self._providers)
        if self._schedule is not None and self._on_gpu:
            _adopted.append(self._schedule)

    def run(self, call: Call) -> torch.Tensor:
        """The call's result; of an algorithm that fails the plan is rid for good, with one warning."""
        problem = self.plan.problem
        while (schedule := self._schedule) is not None:
            target = call.input.new_empty_strided(problem.target_shape, self._strides)
            try:
                schedule.run(call.operands(target))
                return target
            except LaunchError as error:
                del target
                self._warn(error)
                self._adopt(self.plan.without(error))
        return stock_result(problem, call.operands())

    def records(self) -> list[Record]:
        """The plan for people."""
        return self.plan.records()

    def _warn(self, error: LaunchError) -> None:
        if not self._warned:
            self._warned = True
            problem = self.plan.problem
            warnings.warn(
                f"mucudnn: {problem.direction} of {problem} goes on with the next best plan: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
