"""The all-to-all: every rank of a group sends a part of a flat tensor to every other, without waiting for it."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor

from distconv.transfer.account import ACCOUNT
from distconv.transfer.graph_collectives import arrived, started
from distconv.transfer.tracing import is_traced

AWAKE_SECONDS = 5e-4
"""How long a rank looks for its messages on a CPU, other threads going first, before it sleeps until they arrive."""


NOT_SENT = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""The dtypes that Gloo does not send; their bytes are sent instead."""


def as_sent(x: Tensor) -> Tensor:
    """A flat tensor as one of a dtype that every backend sends: itself, or a view of its bytes."""
    return x.view(torch.uint8) if x.dtype in NOT_SENT else x


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
        if is_traced(input):
            self._output = started("all_to_all_single", input, group, received, sent)
            return
        ACCOUNT.to_each(input, sent, group)
        if input.dtype in NOT_SENT:
            received, sent = ([input.element_size() * count for count in counts] for counts in (received, sent))
            output, input = as_sent(output), as_sent(input)
        self._work = dist.all_to_all_single(output, input, received, sent, group=group, async_op=True)

    def wait(self) -> Tensor:
        """``output``, filled, or a new tensor where a graph is traced."""
        if self._work is None:
            return arrived(self._output)
        begin = time.perf_counter()
        if self._output.device.type == "cpu":
            # A halo on its way arrives sooner than a sleeping thread wakes up.
            while not self._work.is_completed() and time.perf_counter() < begin + AWAKE_SECONDS:
                os.sched_yield()
        ACCOUNT.wait(self._work, begin)
        return self._output
