"""The whole tensors of a call's results, or of its gradients: every part writes its own box of each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from distconv.model.direct.activation import Activation
from distconv.tensors.autograd_nodes import RESULTS_OF_PARTS, nodes_of, origin_node
from distconv.tensors.dtensors import memory_format, wrap
from distconv.tensors.layouts import added_up, has_partial, local_box
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import redistributed
from distconv.turns.heap import keep_small
from distconv.turns.mail import Mail, MailState

HOST = torch.device("cpu")


class Wholes:
    """The whole tensors of one run, filled when all parts have ended. Every part makes the same ones in one order.

    ``zero``: whether they begin with zeros. ``first``: the key of the first one that is made without a key.

    Attributes:
        made: the whole tensors by key.
    """

    def __init__(self, parts: int, zero: bool = False, first: int = 0) -> None:
        self.made: dict[int, Tensor] = {}
        self.parts: list[dict[int, Tensor]] = [{} for _ in range(parts)]
        """The local tensors of the results through which gradients flow, by part."""
        self.leaves: list[dict[int, Tensor]] = [{} for _ in range(parts)]
        """The tensors that require gradients and that no others were computed from, by part."""
        self._next = [first] * parts
        self._zero = zero
        self._written: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        """The keys and boxes that parts of this process have written."""

    def of(self, part: int, x: Any, key: int | None = None, device: torch.device | None = None) -> Tensor:
        """The whole tensor of a part's DTensor, which writes its box; of a plain tensor, the one that came first.

        Collective where it is a partial sum. ``key``: by default, tensors are counted. ``device``: of the whole tensor;
        None: that of the part's.
        """
        if isinstance(x, Activation):
            x = x.as_dtensor()
        is_plain = not isinstance(x, DTensor)
        if not is_plain and has_partial(x.placements):
            x = redistributed(x, x.device_mesh, tuple(added_up(x.placements)))
        if key is None:
            key = self._next[part]
            self._next[part] += 1
        if x.requires_grad:
            (self.leaves if x.is_leaf else self.parts)[part][key] = x
            if x.is_leaf and x.grad is not None:
                self.of(part, x.grad, key=-1 - key)
                x.grad = None
        if is_plain:
            return self.made.setdefault(key, x.detach())
        with torch.no_grad():
            local, mesh, placements = x.detach()._local_tensor, x.device_mesh, x.placements
            if key not in self.made:
                form = memory_format(local)
                fake = local.fake_mode if isinstance(local, FakeTensor) else contextlib.nullcontext()
                with _disable_current_modes(), fake:  # it is the caller's, not the parts'
                    where = local.device if device is None else device
                    made = torch.empty(tuple(x.shape), dtype=local.dtype, device=where, memory_format=form)
                    keep_small(made)
                    self.made[key] = made.zero_() if self._zero else made
            whole = self.made[key]
            coordinate = mesh.get_coordinate() or ()
            if all(placement.is_shard() or not at for placement, at in zip(placements, coordinate, strict=True)):
                box = local_box(mesh, placements, x.shape)
                whole[_slices(box)].copy_(local)
                self._written.append((key, tuple(box)))
        return whole

    def is_read_by_others(self, number: int) -> bool:
        """Whether other results that a part has not yet differentiated were computed from the result of a number."""
        key = [*self.made][number]
        for results in self.parts:
            own = origin_node(results[key]) if key in results else None
            if own is not None and own in nodes_of(origin_node(x) for at, x in results.items() if at != key):
                return True
        return False

    def take_leaves(self) -> list[Tensor]:
        """Takes out the whole tensors that the call has made to collect gradients (``y.detach().requires_grad_()``)."""
        leaves = {key: self.made.pop(key).requires_grad_() for key in self.leaves[0]}
        for key, x in leaves.items():
            x.grad = self.made.pop(-1 - key, None)
        return [*leaves.values()]

    def take_gradients(self, leaves: dict[int, Tensor], part: int) -> None:
        """Takes the gradients that a part's leaves of forward have got; `gradients` has them in the end."""
        for number, x in enumerate(leaves.values()):
            if x.grad is not None:
                self.of(part, x.grad, key=-1 - number)
                x.grad = None

    def gradients(self, leaves: int) -> list[Tensor | None]:
        """The gradients of the whole leaves of forward."""
        return [self.made.get(-1 - number) for number in range(leaves)]

    def forget(self) -> None:
        """Drops the whole tensors, which the caller has now; their keys stay."""
        self.made = dict.fromkeys(self.made)  # type: ignore[assignment]

    def share(self, mail: Mail, failure: BaseException | None = None) -> None:
        """Exchanges the boxes that parts of all ranks have written, or raises the error of a rank. Collective."""
        with torch.no_grad():
            for key, box in self._written:
                whole = self.made[key]
                for rank in range(mail.ranks):
                    if rank != mail.rank:
                        mail.send(rank, [key, box, whole.shape], [whole[_slices(box)]])
            self._written.clear()
            delivery = mail.exchange(MailState.ENDED if failure is None else MailState.FAILED, failure)
            if delivery.failure is not None:
                raise delivery.failure
            for (key, box, shape), (part,) in delivery.letters:
                if key not in self.made:  # only parts of other ranks have something of it
                    self.made[key] = part.new_zeros(shape)
                self.made[key][_slices(box)].copy_(part)


@RESULTS_OF_PARTS
class InTurn(torch.autograd.Function):
    """The node of autograd's graph of a call in parts: one for all of its results, which are ``call.wholes``."""

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        made, parts = call.wholes.made, call.wholes.parts
        ctx.mark_non_differentiable(*(x for key, x in made.items() if not any(key in part for part in parts)))
        return tuple(made.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        gradients = ctx.call.differentiable_gradients if torch.is_grad_enabled() else ctx.call.backward
        return None, *gradients(grads)


def laid_out(whole: Tensor, x: Tensor) -> Tensor:
    """A whole tensor in the layout of a part's tensor."""
    if isinstance(x, DTensor):
        return wrap(local_as(whole, x.device_mesh, x.placements), x.device_mesh, x.placements, x.shape)
    return whole


def _slices(box: Iterable[Sequence[int]]) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in box)
