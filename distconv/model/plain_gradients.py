"""Gradients of plain tensors beside distributed ones: they are gathered, and plain from there on.

A loss may compute one term of a small result, which is plain, and add it to a term of a large one, which has shards.
The gradient of the plain term arrives with the layout of the other. The term counts as replicated, so every rank needs
all of its gradient.
"""

from __future__ import annotations

import functools

from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.model.shard_gather import gather
from distconv.tensors import hooks
from distconv.tensors.mesh import is_ours


@functools.cache
def open_plain_gradients() -> None:
    """From now on the gradient of a plain tensor beside a DTensor of ours is plain, too."""
    hooks.differentiated_operands.append(_gather_gradient)


def _gather_gradient(x: Tensor) -> None:
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(functools.partial(_gathered, x.output_nr))


def _gathered(output: int, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    grad = grads[output]
    if not (isinstance(grad, DTensor) and is_ours(grad.device_mesh)):
        return None
    return *grads[:output], gather(grad), *grads[output + 1 :]
