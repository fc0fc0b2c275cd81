"""Collectives of tensors as large on all ranks: allreduce, allgather, and reduce-scatter, which is its adjoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distconv.transfer import group_calls
from distconv.transfer.group_calls import start_in_graph, wait_in_graph
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
        if type(x) is not Tensor and is_traced(x):
            self._x = start_in_graph("all_reduce", x, group, _NAMES[op])
        else:
            group_calls.count_sum(x, group)
            self._work = group_calls.all_reduce(x, op, group=group)

    def wait(self) -> Tensor:
        """The reduction: ``x``, which it has overwritten, or a new tensor where a graph is traced."""
        if self._work is None:
            return wait_in_graph(self._x)
        group_calls.wait(self._work)
        return self._x


def all_reduced(x: Tensor, group: dist.ProcessGroup | None, op: Any = SUM) -> Tensor:
    """The reduction of ``x``, which may be overwritten with it. Collective over the group."""
    if x.dtype == torch.bool:  # which Gloo does not know
        return all_reduced(x.to(torch.uint8), group, _OF_BITS[op]).to(torch.bool)
    if x.dtype == torch.int16:  # neither Gloo nor NCCL knows it
        return all_reduced(x.to(torch.int32), group, op).to(torch.int16)
    return AllReduce(x, group, op).wait()


NOT_SENT = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128)
"""The dtypes that some backend does not send; their bytes are sent instead."""

new_empty: Any = Tensor.new_empty  # Torch's own, also where a model runs, whose new tensors may be sharded later.
new_full: Any = Tensor.new_full


def as_sent(x: Tensor) -> Tensor:
    """A flat tensor as one of a dtype that every backend sends: itself, or a view of its bytes."""
    return x.view(torch.uint8) if x.dtype in NOT_SENT else x


def gather_into(output: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Any:
    """Begins to fill flat `output` with flat `own` of every member in turn; the work to wait for. Collective."""
    group_calls.count_sent("allgather", own, output.nbytes - own.nbytes, group)
    if own.dtype in NOT_SENT:
        output, own = as_sent(output), as_sent(own)
    return group_calls.all_gather_single(output, own, group=group)


def scatter_sum_into(output: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Any:
    """Begin to fill flat ``output`` with this member's part of the sum of flat ``own`` of all; the work to wait for."""
    group_calls.count_sent("reduce-scatter", own, own.nbytes - output.nbytes, group)
    return group_calls.reduce_scatter_single(output, own, group=group)


def all_gathered(own: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """Flat ``own`` of every member in turn, in one flat tensor. Collective over the group of ``ranks`` members."""
    if type(own) is not Tensor and is_traced(own):
        return wait_in_graph(start_in_graph("all_gather_into_tensor", own, group, ranks))
    output = new_empty(own, ranks * own.numel())
    group_calls.wait(gather_into(output, own, group))
    return output


def scatter_sum(own: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """This member's part, flat, of the sum of flat ``own`` of all ``ranks`` members. Collective over the group."""
    if is_traced(own):
        return wait_in_graph(start_in_graph("reduce_scatter_tensor", own, group, "sum", ranks))
    output = new_empty(own, own.numel() // ranks)
    group_calls.wait(scatter_sum_into(output, own, group))
    return output
