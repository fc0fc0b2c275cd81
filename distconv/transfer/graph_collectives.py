"""Collectives of a graph that torch.compile makes: torch's functional ones, which a graph can contain."""

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
def kept() -> Iterator[None]:
    """A context whose collectives stay in the graph, forward or backward, that is being traced."""
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


def started(name: str, x: Tensor, group: dist.ProcessGroup | None, *args: Any) -> Tensor:
    """A group's collective in a graph, which starts here: its result is there once ``arrived`` has waited for it.

    It stays in the graph, forward or backward, in which a rule called it. Otherwise a rank that sends nothing would do
    the one of backward in forward, since its input depends on no gradient, and another rank would not.
    """
    with kept():
        assert group is not None  # in a graph it has a name
        result: Tensor = getattr(torch.ops._c10d_functional, name)(x, *args, group.group_name)
        return result


def arrived(x: Tensor) -> Tensor:
    """The result of a collective of a graph. The wait stays in the graph even if nothing reads it."""
    with kept():
        result: Tensor = torch.ops._c10d_functional.wait_tensor(x)
        return result
