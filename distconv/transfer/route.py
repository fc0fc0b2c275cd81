"""What all transfers are, and the engine beneath them: pieces are packed, cross in one collective, and are unpacked."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from distconv.transfer.all_to_all import AllToAll
from distconv.transfer.gathering import new_empty
from mucudnn.convolution.geometry import Interval


class Transfer(Protocol):
    """A linear map from what the ranks own to what they need, with its adjoint.

    Made once from layouts or needs, without communication, and cached; applied many times.

    Both methods are collective over the ranks of the transfer, unless nothing moves between any two of them: every
    rank knows that from the same shapes, and all calls of all ranks agree.
    """

    def fetch(self, local: Tensor) -> Tensor:
        """The elements that this rank needs, from those that it owns."""

    def adjoint(self, grad: Tensor) -> Tensor:
        """The gradient of what this rank owns, from that of what it needs: the transposed map."""


@dataclass(frozen=True)
class Route:
    """The numbers of elements that this rank sends to, and receives from, each member of a group."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: dist.ProcessGroup | None = field(repr=False)

    def send(self, pieces: Sequence[Tensor], like: Tensor, each: int = 1) -> AllToAll:
        """Pieces, in the order of the members that they go to, on their way. Collective over the group.

        ``each``: how many elements one counts in ``sent`` and ``received``. ``like`` has the dtype and the device.
        """
        received, sent = [count * each for count in self.received], [count * each for count in self.sent]
        return AllToAll(new_empty(like, sum(received)), packed(pieces, like), received, sent, self.group)

    @functools.cached_property
    def back(self) -> Route:
        """The way in the other direction, as an adjoint takes it."""
        return Route(self.received, self.sent, self.group)


def per_peer(moves: Iterable[tuple[int, int]], ranks: int) -> tuple[int, ...]:
    """The numbers of elements sent to, or received from, each member of a group, from (member, number) of each move."""
    counts = [0] * ranks
    for peer, count in moves:
        counts[peer] += count
    return tuple(counts)


def packed(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """The elements of all pieces, one piece after the other, in one flat tensor."""
    if not pieces:
        return new_empty(like, 0)
    if len(pieces) == 1:
        return pieces[0].reshape(-1).contiguous()
    return torch.cat([piece.reshape(-1) for piece in pieces])


def unpacked(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of a flat tensor: pieces of these shapes, one after the other."""
    pieces, start = [], 0
    for shape in shapes:
        count = math.prod(shape)
        pieces.append(flat.narrow(0, start, count).view(shape))
        start += count
    return pieces


def part(tensor: Tensor, dim: int, interval: Interval) -> Tensor:
    """A view of an interval of a dim; ``tensor`` itself where that is all of it, which takes no time."""
    start, stop = interval
    return tensor if stop - start == tensor.shape[dim] else tensor.narrow(dim, start, stop - start)
