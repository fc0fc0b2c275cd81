"""Collectives in a graph that torch.compile traces: torch's functional ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import traceback

from distconv.transfer.unread import BACKWARD, FORWARD


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
        result: Tensor = getattr(torch.ops._c10d_functional, name)(x, *args, group.group_name)
        return result


def wait_in_graph(x: Tensor) -> Tensor:
    """The result of a collective in a graph, after a wait for it, which stays in the graph even if nothing reads it."""
    with pinned_to_graph():
        result: Tensor = torch.ops._c10d_functional.wait_tensor(x)
        return result
