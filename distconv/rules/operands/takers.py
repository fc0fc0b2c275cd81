"""The interface of what takes the gradient of a parameter from the backward of a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Taker(Protocol):
    """Takes a gradient from the backward that has computed it."""

    def __call__(self, grad: Tensor) -> Tensor:
        """Called once for each backward. Returns what is passed on as the gradient."""

    def arriving(self, tensor: Tensor) -> Tensor:
        """The tensor for functions that autograd records in backward: their gradient is taken, too."""


Takes = Sequence[Taker | None]  # Of a layer's weight and bias.


def taken(grad: Tensor | None, take: Taker | None) -> Tensor | None:
    """What is passed on as a gradient, after it was given to what takes it, if anything."""
    return grad if grad is None or take is None else take(grad)
