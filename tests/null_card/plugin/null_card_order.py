"""What the card's watch over the order of uses finds, as text with both Python stacks (order.c, pinned.c).

It watches where NULL_CARD_ORDER is 1. A fault is written to stderr, or appended to the file that
NULL_CARD_ORDER_FAULTS names, by every process.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.cuda import _gpu_trace
from torch.utils._pytree import tree_leaves

FAULTS = "NULL_CARD_ORDER_FAULTS"
MOST_FRAMES = 30

MOST_RUNS = 256
"""A tensor in more pieces counts as all the memory from its first to its last."""

HOST, DEFAULT = 0, 1
NO_STACK = -1

Frame = tuple[Any, int]
Stack = tuple[Frame, ...]


class Access(ctypes.Structure):
    """A use of memory; as `struct access` in order.h."""

    _fields_ = (
        ("actor", ctypes.c_int),
        ("writes", ctypes.c_int),
        ("stack", ctypes.c_int),
        ("epoch", ctypes.c_uint32),
        ("sequence", ctypes.c_uint64),
        ("what", ctypes.c_char_p),
    )


class Fault(ctypes.Structure):
    """Two uses that nothing has put in order; as `struct fault` in order.h."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("before", Access),
        ("after", Access),
        ("before_stream", ctypes.c_uint64),
        ("after_stream", ctypes.c_uint64),
        ("is_freed", ctypes.c_int),
        ("freed_stack", ctypes.c_int),
    )


class Watch:
    """Stacks by number, and what was found; it lives as long as the process."""

    def __init__(self, card: ctypes.CDLL) -> None:
        self._card = card
        card.null_card_touch.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._names: dict[bytes, bytes] = {}
        self._numbers: dict[Stack, int] = {}
        self._stacks: list[Stack] = []
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self.collected: list[str] | None = None
        """Where faults go instead, while a test provokes them."""
        stack = ctypes.CFUNCTYPE(ctypes.c_int)(self.stack)
        tell = ctypes.CFUNCTYPE(None, ctypes.POINTER(Fault))(lambda fault: self._found(fault.contents))
        self._kept = stack, tell
        card.null_card_order.argtypes = type(stack), type(tell)
        card.null_card_order(stack, tell)
        atexit.register(lambda: card.null_card_order(type(stack)(), type(tell)()))
        self._watch_memory(card)

    def _watch_memory(self, card: ctypes.CDLL) -> None:
        torch._C._activate_gpu_trace()
        card.null_card_memory.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_int
        _gpu_trace.register_callback_for_memory_allocation(lambda at: card.null_card_memory(at, 0, NO_STACK))
        _gpu_trace.register_callback_for_memory_deallocation(lambda at: card.null_card_memory(at, 1, self.stack()))

    def stack(self) -> int:
        """A number for the Python functions that are being called in this thread; torch's own threads have none."""
        frame, found = sys._getframe().f_back, []
        while frame is not None and len(found) < MOST_FRAMES:
            if not frame.f_code.co_filename.startswith(OWN):
                found.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(found)
        with self._lock:
            number = self._numbers.setdefault(key, len(self._stacks))
            if number == len(self._stacks):
                self._stacks.append(key)
        return number

    def touching(
        self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Any]
    ) -> Callable[[int | None], None]:
        """What tells the card which memory an operator uses, on the stream that it is then given.

        Args:
            made: what the operator returns. Of what it is given, it writes what its schema says that it changes; so
                running statistics, of which schemas say nothing, count as read.
        """
        uses, name = _uses(operator._schema.arguments, args, kwargs, made), operator._schema.name.encode()
        kept = self._names.setdefault(name, name)  # the card keeps its address

        def touch(stream: int | None) -> None:
            for at, size, writes in uses:
                self._card.null_card_touch(stream, kept, at, size, writes)

        return touch

    def _found(self, fault: Fault) -> None:
        text = described(fault, self._lines)
        if self.collected is not None:
            self.collected += [text] if text not in self.collected else []
        elif text not in self._told:
            self._told.add(text)
            path = os.environ.get(FAULTS)
            with open(path, "a") if path else os.fdopen(os.dup(2), "w") as file:
                file.write(f"{text}\n")

    def _lines(self, number: int) -> list[str]:
        return [f"{code.co_filename}:{line} in {code.co_qualname}" for code, line in self._stacks[number]]


OWN = str(Path(__file__).parent / "null_card")
_WATCH: list[Watch] = []


def begin(card: ctypes.CDLL) -> Watch | None:
    """Begins to keep stacks, where the card watches."""
    if os.environ.get("NULL_CARD_ORDER", "0") == "0":
        return None
    _WATCH.append(Watch(card))
    return _WATCH[0]


def is_kept() -> bool:
    """Whether this process watches."""
    return bool(_WATCH)


@contextmanager
def collected() -> Iterator[list[str]]:
    """The faults of this process that are found within, which are then not told otherwise."""
    found: list[str] = []
    _WATCH[0].collected = found
    try:
        yield found
    finally:
        _WATCH[0].collected = None


@contextmanager
def in_order() -> Iterator[None]:
    """Raises an error where a fault is found within, by this process or by one that it starts.

    Raises:
        AssertionError: with the text of the faults.
    """
    if not is_kept():
        yield
        return
    if FAULTS not in os.environ:
        file, os.environ[FAULTS] = tempfile.mkstemp(prefix="null-card-order-")
        os.close(file)
        atexit.register(os.unlink, os.environ[FAULTS])
    path = Path(os.environ[FAULTS])
    known = len(path.read_text())
    yield
    found = path.read_text()[known:]
    assert not found, f"the null card found uses of memory that nothing puts in order:\n{found}"


def described(fault: Fault, lines: Any) -> str:
    """The kind of a fault in its first line, then who did what where."""
    parts = [kind(fault), _use(fault.after, fault.after_stream, lines)]
    parts += ["  after, without a wait between,", _use(fault.before, fault.before_stream, lines)]
    if fault.is_freed and fault.freed_stack != NO_STACK:
        parts += ["  freed at", *(f"    {line}" for line in lines(fault.freed_stack))]
    return "\n".join(parts)


def kind(fault: Fault) -> str:
    """One of the four kinds of fault, or, of writes, a fifth."""
    if fault.after.actor == HOST:
        return "the host uses what a stream has not ended with"
    if fault.is_freed:
        return "memory was freed while a stream still used it"
    if not fault.after.writes:
        return "a stream reads what another one may not have written yet"
    before = "writes" if fault.before.writes else "reads"
    return f"a stream writes over what another one still {before}"


def _use(access: Access, stream: int, lines: Any) -> str:
    who = "the host" if access.actor == HOST else "the default stream" if stream == DEFAULT else f"stream {stream}"
    does = "writes" if access.writes else "reads"
    where = lines(access.stack) if access.stack != NO_STACK else []
    first = f"  {who} {does}: {access.what.decode()}"
    return "\n".join([first, *(f"    {line}" for line in where or ["(outside Python)"])])


def _uses(
    arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Any]
) -> list[tuple[int, int, bool]]:
    """(address, bytes, whether it is written) of all that an operator uses on the card."""
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    tensors = []
    for argument in arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        tensors += [(value, is_written) for value in tree_leaves(given.get(argument.name)) if _is_on_card(value)]
    known = {id(tensor) for tensor, _ in tensors}
    tensors += [(value, True) for value in made if _is_on_card(value) and id(value) not in known]
    return [
        (tensor.data_ptr() + first * tensor.itemsize, run * tensor.itemsize, is_written)
        for tensor, is_written in tensors
        for first, run in runs(tuple(tensor.shape), tensor.stride(), MOST_RUNS)
    ]


def _is_on_card(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def runs(shape: tuple[int, ...], stride: tuple[int, ...], most: int) -> list[tuple[int, int]]:
    """The runs of elements that a tensor covers, as (first, count); one over all of them where there would be more.

    Args:
        most: the most runs.
    """
    if 0 in shape:
        return []
    dims = sorted((step, extent) for step, extent in zip(stride, shape, strict=True) if extent > 1 and step)
    run = 1
    while dims and dims[0][0] <= run:
        step, extent = dims.pop(0)
        run += step * (extent - 1)
    count = 1
    for _, extent in dims:
        count *= extent
    if count > most:
        return [(0, run + sum(step * (extent - 1) for step, extent in dims))]
    places = itertools.product(*(range(0, step * extent, step) for step, extent in dims))
    return sorted((sum(place), run) for place in places)
