"""The allreduce: every rank of a group gets the sum, or another reduction, of what all of them have."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distconv.transfer.account import ACCOUNT
from distconv.transfer.graph_collectives import arrived, started
from distconv.transfer.tracing import is_traced

SUM, MAX, MIN, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT

_OF_BITS = {SUM: MAX, MAX: MAX, MIN: MIN, PRODUCT: MIN}
"""A sum of booleans is true where one is, a product where all are; a sum of bytes is 0 on 256 ranks again."""

_NAMES = {SUM: "sum", MAX: "max", MIN: "min", PRODUCT: "product"}


class AllReduce:
    """One allreduce, which starts when the object is made. Collective over the group.

    Until :meth:`wait` returns, ``x`` must not be read nor written to.
    """

    def __init__(self, x: Tensor, group: dist.ProcessGroup | None, op: Any = SUM) -> None:
        self._x, self._work = x, None
        if is_traced(x):
            self._x = started("all_reduce", x, group, _NAMES[op])
        else:
            ACCOUNT.summed(x, group)
            self._work = dist.all_reduce(x, op, group=group, async_op=True)

    def wait(self) -> Tensor:
        """The reduction: ``x``, which it has overwritten, or a new tensor where a graph is traced."""
        if self._work is None:
            return arrived(self._x)
        ACCOUNT.wait(self._work)
        return self._x


def all_reduced(x: Tensor, group: dist.ProcessGroup | None, op: Any = SUM) -> Tensor:
    """The reduction of ``x``, which may be overwritten with it. Collective over the group."""
    if x.dtype == torch.bool:  # which Gloo does not know
        return all_reduced(x.to(torch.uint8), group, _OF_BITS[op]).to(torch.bool)
    if x.dtype == torch.int16:  # neither Gloo nor NCCL knows it
        return all_reduced(x.to(torch.int32), group, op).to(torch.int16)
    return AllReduce(x, group, op).wait()
