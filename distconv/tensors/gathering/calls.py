"""Decides whether an operator belongs to a model's call, where nothing large is gathered, or to the script around it.

A backward operator belongs where its forward was: autograd numbers the nodes of its graph in the order in which they
are made, so the first and the last number identify a call.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator

import torch

MOST_CALLS = 1000  # The most calls whose numbers are kept: the backward of an older one counts as the script's.


class _Thread(threading.local):
    depth = 0


_thread = _Thread()

_numbers: collections.deque[tuple[int, int]] = collections.deque(maxlen=MOST_CALLS)
"""The first number of each call, and the one after its last; common to all threads, as backward may run in another."""


@contextlib.contextmanager
def model_call() -> Iterator[None]:
    """A context in which operators belong to a model's call."""
    first = torch._C._autograd._get_sequence_nr()
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1
        after = torch._C._autograd._get_sequence_nr()
        if after > first and not _thread.depth:
            _numbers.append((first, after))


@contextlib.contextmanager
def script_code() -> Iterator[None]:
    """A context in which operators belong to the script, whatever model is being called."""
    depth, _thread.depth = _thread.depth, 0
    try:
        yield
    finally:
        _thread.depth = depth


def in_model_call() -> bool:
    """Whether the operator that runs now belongs to a model's call, or to a graph that is being compiled."""
    if _thread.depth or torch.compiler.is_compiling():
        return True
    node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
    if node is None:
        return False
    number = node._sequence_nr()
    return any(first <= number < after for first, after in reversed(tuple(_numbers)))
