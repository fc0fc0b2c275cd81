"""Results that are equal in all parts in turn: the first part that needs one computes it for all of this process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

Made = tuple[Any, ...]
"""Tensors, and what else is the same object for all parts."""


class Shared:
    """Results that are equal in so many parts, each of which asks for them in the same order."""

    def __init__(self, parts: int) -> None:
        self.parts, self.runs = parts, 0
        self.begin()

    def begin(self) -> None:
        """Begins a run of the parts: nothing that was made before is taken any more."""
        self.runs += 1
        self._taken = [0] * self.parts
        self._made: dict[int, Made] = {}

    def take(self, part: int, compute: Callable[[], Made]) -> Made:
        """The next result of a part. Every part gets memory of its own, to which it may write."""
        number = self._taken[part]
        self._taken[part] += 1
        if number in self._made:
            made = self._made[number]
        else:
            thread.computes = True
            try:
                made = compute() if thread.records is None else thread.records(compute)
            finally:
                thread.computes = False
        if min(self._taken) > number:
            self._made.pop(number, None)
            return made
        self._made[number] = made
        return tree_map_only(Tensor, lambda x: x.clone(memory_format=torch.preserve_format), made)


class _Thread(threading.local):
    shared: Shared | None = None
    part = 0
    as_one: Callable[[Sequence[Tensor], Callable[[], Made]], Made] | None = None
    records: Callable[[Callable[[], Made]], Made] | None = None
    computes = False


thread = _Thread()
"""Of a thread that computes a part: what the parts of its process share, and its number among them. ``as_one``: within
a limit of memory, what calls a function that reads some tensors as one operator, however many it consists of.
``records``: where one part is followed for all, what computes what they share. ``computes``: whether it now computes
what they share.
"""


class _AsOne(torch.autograd.Function):
    """A function that is one operator: it keeps nothing but its inputs, and is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, function: Any, *tensors: Tensor) -> Any:
        assert thread.as_one is not None
        ctx.set_materialize_grads(False)
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return thread.as_one(tensors, lambda: tuple(function(*tensors)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        assert thread.as_one is not None
        wanted = ctx.needs_input_grad[1:]
        tensors = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, wanted, strict=True)]

        def again() -> Made:
            with torch.enable_grad():
                return _gradients(tensors, ctx.function(*tensors), grads, keep=False)

        return None, *thread.as_one((*tensors, *(x for x in grads if x is not None)), again)


def _gradients(inputs: Sequence[Tensor], results: Sequence[Tensor], grads: Sequence[Tensor | None], keep: bool) -> Made:
    """The gradient of each input that needs one, None of others."""
    pairs = [(y, grad) for y, grad in zip(results, grads, strict=True) if grad is not None]
    wanted = [x for x in inputs if x.requires_grad]
    made, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(made, wanted, given, retain_graph=keep, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


class _Call:
    """A function's results with their graph, from forward to backward; all parts have it."""

    def __init__(self, function: Callable[..., Sequence[Tensor]], shared: Shared, records: bool) -> None:
        self._function, self._shared, self._records = function, shared, records
        self._gradients = Shared(shared.parts)
        self._run = shared.runs

    def forward(self, tensors: Sequence[Tensor]) -> Made:
        """The call itself, and the results."""
        with torch.set_grad_enabled(self._records):
            self._inputs = [x.detach().requires_grad_(x.requires_grad and self._records) for x in tensors]
            self._results = tuple(self._function(*self._inputs))
        found = self, *(x.detach() for x in self._results)
        if not self._records:
            del self._inputs, self._results
        return found

    def backward(self, grads: Sequence[Tensor | None]) -> Made:
        if self._run != self._shared.runs:
            self._run = self._shared.runs
            self._gradients.begin()
        return self._gradients.take(thread.part, lambda: self._of_all(grads))

    def _of_all(self, grads: Sequence[Tensor | None]) -> Made:
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        return _gradients(self._inputs, self._results, grads, keep)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Shared, function: Any, records: bool, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, *results = shared.take(thread.part, lambda: _Call(function, shared, records).forward(tensors))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *ctx.call.backward(grads)


def once(function: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> Sequence[Tensor]:
    """``function(*tensors)``, of tensors that are whole and the same in all parts of this process, which reach it in
    the same order: computed by the first of them, and so is its gradient. Without parts it is the function itself, and
    also where hooks see what is saved for backward, as those of a checkpoint: parts would wait for others within one
    graph.
    """
    function = functools.partial(as_operator, function)
    if thread.shared is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return function(*tensors)
    return _Once.apply(thread.shared, function, torch.is_grad_enabled(), *tensors)


def as_operator(function: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> Sequence[Tensor]:
    """``function(*tensors)``; within a limit of memory it is one operator, whose inputs stay while it is computed."""
    return function(*tensors) if thread.as_one is None else _AsOne.apply(function, *tensors)
