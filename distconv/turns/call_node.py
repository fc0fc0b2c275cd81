"""The node of autograd's graph of a call in parts: one for all of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from distconv.tensors.autograd_nodes import RESULTS_OF_PARTS
from distconv.turns.wholes import Wholes


class Differentiated(Protocol):
    """A call whose gradients autograd asks for. ``wholes``: its results."""

    wholes: Wholes

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients of the call's tensors, from those of its results."""

    def differentiable_gradients(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The same, recorded by autograd."""


@RESULTS_OF_PARTS
class InTurn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Differentiated, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        made, parts = call.wholes.made, call.wholes.parts
        ctx.mark_non_differentiable(*(x for key, x in made.items() if not any(key in part for part in parts)))
        return tuple(made.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: Differentiated = ctx.call
        return None, *(call.differentiable_gradients if torch.is_grad_enabled() else call.backward)(grads)
