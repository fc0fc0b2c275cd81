"""Collectives of a graph that torch.compile makes: torch's functional ones, which a graph can hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What is traced within it stays in the graph, forward or backward, that is being traced."""
    if not traceback.has_preserved_node_meta():  # there are no two graphs yet
        yield
        return
    meta, tag = traceback.current_meta, "partitioner_tag"
    before = meta.get(tag)
    meta[tag] = "must_be_in_forward" if torch._C._current_graph_task_id() == -1 else "must_be_in_backward"
    try:
        yield
    finally:
        meta[tag] = before


_library = torch.library.Library("distconv", "FRAGMENT")
_library.define("after(Tensor x, Tensor[] others) -> Tensor")


@torch.library.impl(_library, "after", "CompositeExplicitAutograd")
def _after(x: Tensor, others: list[Tensor]) -> Tensor:
    """x, as something that a graph computes from others too."""
    return x.clone()


_unread: list[tuple[int, Tensor]] = []
"""What collectives have made of nothing in a backward that is traced, each with the number of its backward."""


def started(name: str, x: Tensor, *args: Any) -> Tensor:
    """A collective of a graph, which starts here: what it makes of x is there once ``arrived`` has waited for it.

    It stays in the graph, forward or backward, in which a rule called it. Otherwise a rank that sends nothing would do
    the one of backward in forward, since its input depends on no gradient, and another rank would not.
    """
    with kept():
        result: Tensor = getattr(torch.ops._c10d_functional, name)(_after_unread(x), *args)
    return result


def arrived(x: Tensor) -> Tensor:
    """What a collective of a graph has made. The wait stays in the graph, too, where nothing was received."""
    with kept():
        result: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    backward = torch._C._current_graph_task_id()
    if backward != -1 and not result.numel():
        _unread.append((backward, result))
    return result


def _after_unread(x: Tensor) -> Tensor:
    """x, computed after earlier collectives of this backward that have made nothing.

    A compiler saves for the graph of backward what its results are computed from. A rank that sends there something of
    forward, and receives nothing, would do without, and the others would wait for it.
    """
    backward = torch._C._current_graph_task_id()
    unread = [each for of, each in _unread if of == backward]
    _unread.clear()
    return torch.ops.distconv.after(x, unread) if unread else x
