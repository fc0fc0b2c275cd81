"""The interface of all transfers, and the all-to-all beneath them: pieces are packed, sent at once, and unpacked."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from distconv.transfer import group_calls
from distconv.transfer.collectives import NOT_SENT, as_sent, new_empty
from distconv.transfer.group_calls import start_in_graph, wait_in_graph
from distconv.transfer.tracing import is_traced
from mucudnn.convolution.geometry import Interval
from mucudnn.process import Recent


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
    _counts: Recent[int, tuple[int, list[int], list[int]]] = field(
        default_factory=lambda: Recent(64), repr=False, compare=False
    )
    """By the elements that one counts: all that is received, and what each member sends and receives."""

    def send(self, pieces: Sequence[Tensor], like: Tensor, each: int = 1) -> AllToAll:
        """Starts to send pieces, given in the order of the members that receive them. Collective over the group.

        ``each``: how many elements one counts in ``sent`` and ``received``. ``like`` has the dtype and the device.
        """
        counts = self._counts.get(each)
        if counts is None:
            received, sent = [count * each for count in self.received], [count * each for count in self.sent]
            counts = self._counts[each] = sum(received), received, sent
        return AllToAll(new_empty(like, counts[0]), packed(pieces, like), counts[1], counts[2], self.group)

    @functools.cached_property
    def back(self) -> Route:
        """The route in the other direction, for the adjoint."""
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
    if len(shapes) == 1:
        return [flat.view(shapes[0])]
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


AWAKE_SECONDS = 5e-4
"""How long a rank on a CPU polls for its messages, yielding to other threads, before it sleeps until they arrive."""


class AllToAll:
    """One all-to-all, which starts when the object is made.

    The first ``sent[0]`` elements of flat ``input`` go to member 0 of the group, the next ``sent[1]`` to member 1, and
    so on; flat ``output`` receives ``received[i]`` elements from member i.

    Collective over the group. Until :meth:`wait` returns, ``output`` must not be read nor ``input`` written to.
    """

    def __init__(
        self, output: Tensor, input: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup | None
    ) -> None:
        self._output, self._input, self._work = output, input, None
        if type(input) is not Tensor and is_traced(input):
            self._output = start_in_graph("all_to_all_single", input, group, received, sent)
            return
        whole = dist.group.WORLD if group is None else group
        others = sum(sent) - sent[0 if whole is None else whole.rank()]
        group_calls.count_sent("all-to-all", input, input.element_size() * others, group)
        if input.dtype in NOT_SENT:
            received, sent = ([input.element_size() * count for count in counts] for counts in (received, sent))
            output, input = as_sent(output), as_sent(input)
        self._work = group_calls.all_to_all_single(output, input, received, sent, group=group)

    def wait(self) -> Tensor:
        """``output``, filled, or a new tensor where a graph is traced."""
        if self._work is None:
            return wait_in_graph(self._output)
        begin = time.perf_counter()
        if self._output.is_cpu:
            # A halo on its way arrives sooner than a sleeping thread wakes up.
            while not self._work.is_completed() and time.perf_counter() < begin + AWAKE_SECONDS:
                os.sched_yield()
        group_calls.wait(self._work, begin)
        return self._output
