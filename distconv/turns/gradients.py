"""Gradients in turn: those of parameters are added up part by part, those of inputs are put together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.model.gradients import Bucket
from distconv.tensors.refusal import UnsupportedOperation


class Source(torch.autograd.Function):
    """Tensors that a part begins with; their gradients go to ``take``, and nowhere else."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], tuple[Tensor, ...]], take: Any) -> tuple[Tensor, ...]:
        ctx.take = take
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        if ctx.take is not None:
            ctx.take(grads)
        return None, None, None


def anchor() -> Tensor:
    """What makes autograd record what becomes of a source."""
    return torch.zeros((), requires_grad=True)


class Totals:
    """The gradients of parameters of one call, of all parts together; half types are added in float32."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, parameter: Tensor, share: Tensor) -> None:
        """Adds what a part has found of a parameter's gradient."""
        total = self._sums.get(id(parameter))
        if total is not None:
            total.add_(share)
        elif share.dtype in (torch.float16, torch.bfloat16):
            self._sums[id(parameter)] = share.float()
        else:
            self._sums[id(parameter)] = share.clone(memory_format=torch.preserve_format)

    def take(self, parameter: Tensor, release: Callable[[Tensor], None]) -> Tensor | None:
        """The gradient of a parameter, which is then forgotten; None where it has none. ``release`` is told of it."""
        total = self._sums.pop(id(parameter), None)
        if total is None:
            return None
        release(total)
        return total.to(parameter.dtype)


class _Thread(threading.local):
    totals: Totals | None = None


of_part = _Thread()
"""Where the call that this thread is a part of adds up its gradients."""


class SharedBucket(Bucket):
    """The parameters of a bucket, which all parts share."""

    def sources(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._parameters, self._totals = parameters, of_part.totals
        found: tuple[Tensor, ...] = Source.apply(
            anchor(), lambda: tuple([self.alias(index, each) for index, each in enumerate(parameters)]), None
        )
        return found

    def take(self, index: int, share: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise UnsupportedOperation(SECOND)
        assert self._totals is not None
        self._totals.add(self._parameters[index], share)
        return self.plan.stand_ins[index]


SECOND = "parts in turn: a gradient of a gradient (create_graph=True); accepted: first derivatives, or ranks at once"
