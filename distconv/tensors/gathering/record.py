"""Decides whether an operator belongs to a model's call, where nothing large is gathered, or to the script around it,
for which gathered bytes are counted; each line that gathers much is warned of once.

A backward operator belongs where its forward was: autograd numbers the nodes of its graph in the order in which they
are made, so the first and the last number identify a call.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distconv.tensors.gathering.memory import free_everywhere
from distconv.tensors.refusal import UnsupportedOperation, refuse
from distconv.tensors.user_lines import asked_for
from mucudnn.process import print_line
from mucudnn.sizes import format_bytes

MUCH = 16 << 20  # A line of the script that gathers more bytes than this at a time causes a warning.

CERTAIN = 256 << 20  # Bytes up to which nobody checks whether they fit into memory.

PICKLED = "pickle"  # The operator for which what is saved, such as a checkpoint, is gathered.

MOST_PLACES = 3  # The most lines of the script that the summary names.


class GatherRecord:
    """The bytes that a job has gathered for its script so far."""

    def __init__(self) -> None:
        self.places: Counter[tuple[str, str]] = Counter()
        """All bytes that each rank has received or kept, by line of the script and its operator."""
        self.steps = 0  # Steps that optimizers have taken.

    def add(self, operator: str, size: int) -> None:
        """Counts bytes that are gathered for an operator; prints a warning the first time a line gathers many."""
        line = asked_for()
        is_known = (line, operator) in self.places
        self.places[line, operator] += size
        if size > MUCH and not is_known and dist.get_rank() == 0:
            print_line(
                f"distconv: {operator} {line} needs whole tensors: {format_bytes(size)} are gathered on every rank each"
                f" time; {advice(operator)}"
            )

    def count_step(self, *_: object) -> None:
        """An optimizer is about to step."""
        self.steps += 1

    def summary(self) -> str:
        """One line for people; empty where nothing was gathered."""
        if not self.places:
            return ""
        saved = sum(size for (_, operator), size in self.places.items() if operator == PICKLED)
        total = self.places.total() - saved
        each = [f"{format_bytes(total / self.steps)} a step" if self.steps else f"{format_bytes(total)} in all"]
        each = each * bool(total) + [f"{format_bytes(saved)} for checkpoints"] * bool(saved)
        most = self.places.most_common(MOST_PLACES)
        lines = ", ".join(f"{format_bytes(size)} {line} ({operator})" for (line, operator), size in most)
        more = f", and at {len(self.places) - MOST_PLACES} more lines" if len(self.places) > MOST_PLACES else ""
        return f"outside models every rank gathered {' and '.join(each)}; in all {lines}{more}"


record = GatherRecord()  # The record of this process.


def admit(func: object, size: int, mesh: DeviceMesh) -> None:
    """Count a gather for an operator of the script, of tensors that take ``size`` bytes whole.

    Collective where they are large. UnsupportedOperation, the same on every rank, where some rank lacks the memory.
    """
    if size > CERTAIN:
        free = free_everywhere(mesh)
        # The tensors and the result that is computed from them are in memory at once.
        if 2 * size > free:
            error: UnsupportedOperation = refuse(
                func,
                f"it needs whole tensors of {format_bytes(size)} on every rank, and room for a result, but a rank has"
                f" {format_bytes(free)} of memory left; {advice(str(func))}; accepted: smaller tensors, or more memory",
                whole_helps=False,
            )
            raise error
    record.add(str(func), size)


def advice(operator: str) -> str:
    """A clause with a way to do without whole tensors."""
    if any(name in operator for name in ("index", "masked", "nonzero")):
        return "torch.where, or a product with the mask, computes on shards"
    return "a tensor that is reduced first (mean, argmax, one sample) is smaller"


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
