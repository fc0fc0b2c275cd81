"""What all transfers are: linear maps from what the ranks own to what they need, each with its adjoint."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Transfer(Protocol):
    """Made once from layouts or needs, without communication, and cached; applied many times.

    Both methods are collective over the ranks of the transfer, unless nothing moves between any two of them: every
    rank knows that from the same shapes, and all calls of all ranks agree.
    """

    def fetch(self, local: Tensor) -> Tensor:
        """The elements that this rank needs, from those that it owns."""

    def adjoint(self, grad: Tensor) -> Tensor:
        """The gradient of what this rank owns, from that of what it needs: the transposed map."""
