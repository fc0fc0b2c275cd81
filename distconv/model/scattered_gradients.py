"""Gradients of fully sharded parameters: backward sums the ranks' shares of each as soon as they are there."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from distconv.agreement.ledger import compare_if_due
from distconv.model.fully_sharded import ShardDivision, division, gradient
from distconv.model.gradients import Bucket, BucketPlan
from distconv.model.parameter_gathers import forget_gathered
from distconv.tensors.refusal import UnsupportedOperation
from distconv.transfer import group_calls
from distconv.transfer.stream import Stream

AT_ONCE = 2
"""How many gradients of whole parameters are kept at a time while their sums travel."""


class _Sum:
    """A gradient whose shares are being added up."""

    def __init__(self, share: Tensor, division: ShardDivision) -> None:
        self._division = division
        self._sums, self._work = division.scatter(share)
        self._stream = Stream(share)
        self._part: Tensor | None = None

    def _added(self) -> Tensor:
        group_calls.wait(self._work)
        return self._division.part(self._sums)

    def part(self) -> Tensor:
        """This rank's part of the sum, once it has arrived."""
        if self._part is None:
            self._part = self._stream.run(self._added)
            del self._sums, self._work
        return self._stream.hand_over(self._part)


_travelling: deque[_Sum] = deque()


class FullBucket(Bucket):
    """The gradients of fully sharded parameters: each share is added up as soon as it is there."""

    def __init__(self, plan: BucketPlan) -> None:
        super().__init__(plan)
        self._sums: dict[int, list[_Sum]] = {}

    def expect_one_more(self, index: int) -> None:
        """Nothing: each share is added up by itself."""

    def take(self, index: int, share: Tensor | None) -> Tensor | None:
        if share is None:
            return None
        parameter: Any = self.plan.parameters[index]
        if torch.is_grad_enabled():
            raise UnsupportedOperation(
                f"gradients of gradients of a parameter {tuple(parameter.shape)} that is sharded along all axes;"
                " accepted: without --shard-parameters"
            )
        compare_if_due(self.plan.places[index].mesh)
        while len(_travelling) >= AT_ONCE:  # each keeps a gradient of a whole parameter
            _travelling.popleft().part()
        _travelling.append(_Sum(share, division(parameter)))
        self._sums.setdefault(index, []).append(_travelling[-1])
        return self.plan.stand_ins[index]

    def finish(self) -> dict[int, Tensor]:
        parameters = self.plan.parameters
        parts = {index: [each.part() for each in own] for index, own in self._sums.items()}
        grads: dict[int, Tensor] = {
            index: gradient(sum(own[1:], own[0]), parameters[index]) for index, own in parts.items()
        }
        self._sums = {}
        _travelling.clear()
        forget_gathered()
        return grads
