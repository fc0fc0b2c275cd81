"""Collectives of process groups, called on the groups themselves, and counted; in a traced graph, functional ones.

The `FUNCTIONS` have the names and arguments of torch.distributed's, which make checks of their own first, and which a
job replaces for its script. They only begin a collective. What watches or stands in for distconv's messages replaces
them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.fx import traceback

from distconv.tensors.debug import show_message
from distconv.tensors.read_parts import thread
from distconv.transfer.account import ACCOUNT
from distconv.transfer.unread import BACKWARD, FORWARD

SUM = dist.ReduceOp.SUM

_HAS_NEW_NAMES = hasattr(dist.ProcessGroup, "all_gather_single")  # since torch 2.13
_GATHER, _SCATTER, _ALL_TO_ALL = (
    ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
    if _HAS_NEW_NAMES
    else ("_allgather_base", "_reduce_scatter_base", "alltoall_base")
)


def _begun(kind: str, **values: Any) -> Any:
    """The options of a collective that runs on while the program does."""
    options = getattr(distributed_c10d, f"{kind}Options")()
    for name, value in {**values, "asyncOp": True}.items():
        setattr(options, name, value)
    return options


_REDUCED = {
    op: _begun("Allreduce", reduceOp=op) for op in (SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
}
_GATHERED, _SCATTERED, _EXCHANGED = _begun("Allgather"), _begun("ReduceScatter"), _begun("AllToAll")


def all_reduce(tensor: Tensor, op: Any = SUM, group: dist.ProcessGroup | None = None) -> Any:
    """Begins to overwrite a tensor with its reduction over a group; the work to wait for."""
    if tensor.is_complex():
        if op != SUM:
            raise ValueError(f"all_reduce does not support {op} on complex tensors")
        tensor = torch.view_as_real(tensor)
    return (dist.group.WORLD if group is None else group).allreduce([tensor], _REDUCED[op])  # type: ignore[union-attr]


def all_gather_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> Any:
    """Begins to fill flat ``output`` with flat ``input`` of every member in turn; the work to wait for."""
    return getattr(dist.group.WORLD if group is None else group, _GATHER)(output, input, _GATHERED)


def reduce_scatter_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> Any:
    """Begins to fill flat ``output`` with this member's part of the sum of flat ``input``; the work to wait for."""
    if input.is_complex():
        output, input = torch.view_as_real(output), torch.view_as_real(input)
    return getattr(dist.group.WORLD if group is None else group, _SCATTER)(output, input, _SCATTERED)


def all_to_all_single(
    output: Tensor, input: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup | None = None
) -> Any:
    """Begins to send ``sent[i]`` elements to member i, and to receive ``received[i]``; the work to wait for."""
    group = dist.group.WORLD if group is None else group
    return getattr(group, _ALL_TO_ALL)(output, input, received, sent, _EXCHANGED)


FUNCTIONS = (all_reduce, all_gather_single, reduce_scatter_single, all_to_all_single)


def count_sent(kind: str, x: Tensor, sent: int, group: dist.ProcessGroup | None) -> None:
    """Counts a collective of a tensor that begins, in which this rank sends so many bytes."""
    if thread.part is None:
        ACCOUNT.sent += sent
        if ACCOUNT.shows:
            show_message(kind, x, sent, group)


def count_sum(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Counts an allreduce of a tensor that begins."""
    whole = dist.group.WORLD if group is None else group
    ranks = 1 if whole is None else whole.size()
    count_sent("allreduce", x, 2 * x.nbytes * (ranks - 1) // ranks, group)


def wait(work: Any, since: float | None = None) -> None:
    """Waits for a message, and counts the time. ``since``: of `time.perf_counter`, where the program waits already."""
    begin = time.perf_counter() if since is None else since
    work.wait()
    if thread.part is None:
        ACCOUNT.waited += time.perf_counter() - begin


@contextlib.contextmanager
def pinned_to_graph() -> Iterator[None]:
    """A context whose collectives stay in the graph, that of forward or of backward, that is traced now."""
    if not traceback.has_preserved_node_meta():  # there are no two graphs yet
        yield
        return
    meta, tag = traceback.current_meta, "partitioner_tag"
    before = meta.get(tag)
    meta[tag] = FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD
    try:
        yield
    finally:
        meta[tag] = before


def start_in_graph(name: str, x: Tensor, group: dist.ProcessGroup | None, *args: Any) -> Tensor:
    """Starts a group's collective in a graph; its result may be read after ``wait_in_graph``.

    The collective stays in the graph, that of forward or of backward, in which a rule called it. Otherwise a rank that
    sends nothing would do one of backward in forward, since its input depends on no gradient, and other ranks would
    not.
    """
    with pinned_to_graph():
        assert group is not None  # in a graph it has a name
        return getattr(torch.ops._c10d_functional, name)(x, *args, group.group_name)


def wait_in_graph(x: Tensor) -> Tensor:
    """The result of a collective in a graph, after a wait for it, which stays in the graph even if nothing reads it."""
    with pinned_to_graph():
        return torch.ops._c10d_functional.wait_tensor(x)
