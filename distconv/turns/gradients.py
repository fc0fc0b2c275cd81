"""Gradients of a call in turn: those of parameters are added up part by part, over all parts and ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _take_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv.model.fully_sharded import division, gradient
from distconv.model.gradients import Bucket
from distconv.model.parameter_hooks import not_without_gradient
from distconv.tensors.mesh import whole_group
from distconv.tensors.refusal import UnsupportedOperation
from distconv.transfer.collectives import MAX, all_reduced

BUCKET_BYTES = 4 << 20
"""Gradients in a row are summed over the ranks by a message of about so many bytes, from a copy; a large one alone."""


class GradientSource(torch.autograd.Function):
    """The inputs of a part's graph, made by ``make``; autograd gives their gradients to ``take`` alone."""

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
    """A tensor that requires gradients, so that autograd records a `GradientSource`."""
    return torch.zeros((), requires_grad=True)


class Totals:
    """The gradients of one call's parameters, added up over all parts; half types are added in float32.

    ``is_forward``: whether the call is still in forward.
    ``same``: by the id of a parameter that a part has made, that parameter and the caller's in the same place.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self.is_forward = True
        self.same: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, parameter: Tensor, share: Tensor) -> None:
        """Adds a part's summand of a parameter's gradient."""
        if self.is_forward:
            raise UnsupportedOperation(WITHIN_FORWARD)
        _, parameter = self.same.get(id(parameter), (parameter, parameter))
        total = self._sums.get(id(parameter))
        if total is not None:
            total.add_(share)
        elif share.dtype in (torch.float16, torch.bfloat16):
            self._sums[id(parameter)] = share.float()
        else:
            self._sums[id(parameter)] = share.clone(memory_format=torch.preserve_format)

    def take(
        self,
        parameters: Sequence[Tensor],
        release: Callable[[Tensor], None],
        ranks: DeviceMesh | None,
        sharded: Callable[[Tensor], Tensor],
    ) -> list[Tensor | None]:
        """The gradients of some parameters, which are then forgotten; None for a parameter without one.

        ``release`` is called with each before it is read. Collective over ``ranks``, whose gradients are added up.
        ``sharded`` returns the sharded parameter of a gathered one, whose gradient is sharded, too.
        """
        found = [self._sums.pop(id(parameter), None) for parameter in parameters]
        for total in found:
            if total is not None:
                release(total)
        own = [*map(sharded, parameters)]
        if ranks is not None:
            found = _of_all_ranks(found, parameters, whole_group(ranks), own)
        not_without_gradient(parameter for parameter, total in zip(own, found, strict=True) if total is None)
        return [None if x is None else x.to(p.dtype) for x, p in zip(found, parameters, strict=True)]


def _of_all_ranks(
    found: list[Tensor | None], parameters: Sequence[Tensor], group: dist.ProcessGroup | None, sharded: Sequence[Tensor]
) -> list[Tensor | None]:
    """The sums over the ranks; a parameter has a gradient where it has one on any of them."""
    if not found:
        return []
    has = torch.tensor([x is not None for x in found], dtype=torch.uint8, device=parameters[0].device)
    given = all_reduced(has, group, MAX).tolist()
    result: list[Tensor | None] = []
    for at, (parameter, stored, is_given) in enumerate(zip(parameters, sharded, given, strict=True)):
        own = found[at]
        if own is None and is_given:
            kind = torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype
            own = torch.zeros_like(parameter, dtype=kind)
        if own is not None and stored is not parameter:
            found[at] = None  # a whole gradient, of which this rank keeps its part
            own = gradient(division(stored).summed(own), stored)  # type: ignore[arg-type]
        result.append(own)
    whole = [x for x in result if x is not None and not isinstance(x, DTensor)]
    for bucket in _take_tensors(whole, BUCKET_BYTES):
        is_alone = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0].view(-1) if is_alone else torch.cat([x.reshape(-1) for x in bucket])
        flat = all_reduced(flat, group)
        for x, total in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
            x.copy_(total.view(x.shape))
    return result


@contextlib.contextmanager
def written_by_autograd_alone(parameters: Sequence[Tensor]) -> Iterator[None]:
    """A context for the parts' backward. UnsupportedOperation if a function of a script writes to a ``.grad`` there."""
    before = [(x.grad, None if x.grad is None else x.grad._version) for x in parameters]
    yield
    for x, (grad, version) in zip(parameters, before, strict=True):
        if x.grad is not grad or (grad is not None and grad._version != version):
            raise UnsupportedOperation(
                f"parts in turn: backward of each part writes to .grad of a parameter {tuple(x.shape)}; accepted: an"
                " autograd function that returns the gradients of its parameters, or calls backward()"
            )


class _Thread(threading.local):
    totals: Totals | None = None


of_thread = _Thread()  # Its ``totals`` are those of the call in whose part this thread is.


class SharedBucket(Bucket):
    """The parameters of a bucket, which all parts share."""

    is_apart = True

    def sources(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._parameters, self._totals = parameters, of_thread.totals
        found: tuple[Tensor, ...] = GradientSource.apply(
            anchor(), lambda: tuple([self.alias(index, each) for index, each in enumerate(parameters)]), None
        )
        node: Any = found[0].grad_fn
        node.bucket = self
        return found

    def take(self, index: int, share: Tensor | None) -> Tensor | None:
        if torch.is_grad_enabled():
            raise UnsupportedOperation(SECOND_DERIVATIVE)
        if share is None or self.hands_on:
            return share
        assert self._totals is not None
        if self.takes is None or index in self.takes:
            self._totals.add(self._parameters[index], share)
        return self.plan.stand_ins[index]


SECOND_DERIVATIVE = (
    "parts in turn: a gradient of a gradient (create_graph=True): what parts do in backward is not recorded; accepted:"
    " first derivatives, or ranks at once"
)

WITHIN_FORWARD = "parts in turn: gradients of parameters within forward; accepted: of other tensors, or ranks at once"
