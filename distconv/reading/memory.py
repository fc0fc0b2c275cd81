"""Memory that arrays, tensors and their views share; it is filled from files at its first use."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from distconv.reading.expression import Expression, empty_array, whole_region
from distconv.reading.source import fetched
from distconv.reading.statistic import is_known
from distconv.tensors.user_lines import program_lines
from mucudnn.process import print_line

Step = Callable[[Any], Any]  # Makes a view: of an array or a tensor another one that shares its memory.

_reported: set[tuple[str, str]] = set()


class Memory:
    """The memory of one array: its expression, its values once it is read, and who refers to it."""

    def __init__(self, expression: Expression) -> None:
        self.expression = expression
        self.content: Any = None
        self._holders: list[weakref.ref[Lazy]] = []

    def add(self, holder: Lazy) -> None:
        self._holders = [*filter(lambda each: each() is not None, self._holders), weakref.ref(holder)]

    def is_shared(self, holder: Lazy) -> bool:
        """Whether somebody else sees this memory."""
        return any(each() is not None and each() is not holder for each in self._holders)


class Lazy:
    """Something that looks at a memory: its expression, and the steps from the memory's content to its own."""

    expression: Expression
    memory: Memory
    steps: tuple[Step, ...]
    content: Any

    def look(self, expression: Expression, memory: Memory | None = None, steps: tuple[Step, ...] = ()) -> None:
        """At a memory of its own, if none is given."""
        self.expression, self.memory, self.steps, self.content = expression, memory or Memory(expression), steps, None
        self.memory.add(self)

    @property
    def present(self) -> Any:
        """The array or the tensor itself where it has been read, by whoever sees the same memory; else None."""
        return None if self.memory.content is None else self.read("")

    def fake(self) -> Any:
        """An array or a tensor with the strides that this one would have in memory; nothing touches its elements."""
        return self._seen(empty_array(self.memory.expression.shape, self.memory.expression.dtype))

    def _seen(self, content: Any) -> Any:
        """The view of the content that this array or tensor is."""
        for step in self.steps:
            content = step(content)
        return content

    def read(self, why: str) -> Any:
        """The array or the tensor itself, whole. All who see the memory see the same from now on."""
        if self.content is None:
            if self.memory.content is None:
                if not self.memory.is_shared(self):
                    self.look(self.expression)
                if not is_known(self.memory.expression):
                    report_whole_read(why, self.memory.expression.sources())
                content = self.memory.expression.read(whole_region(self.memory.expression.shape), fetched)
                if isinstance(content, numpy.ndarray) and not content.flags.writeable:
                    content = content.copy()  # what is kept stays as it is
                self.memory.content = content
            self.content = self._seen(self.memory.content)
        return self.content


class Number(Lazy):
    """A lazy array that Python converts to a number: an array of one element."""

    def __bool__(self) -> bool:
        return bool(self.read("bool"))

    def __int__(self) -> int:
        return int(self.read("int"))

    def __index__(self) -> int:
        return operator.index(self.read("operator.index"))

    def __float__(self) -> float:
        return float(self.read("float"))

    def __complex__(self) -> complex:
        return complex(self.read("complex"))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.read("round")[()], digits)

    def __format__(self, how: str) -> str:
        return format(self.read("format")[()], how)

    def __repr__(self) -> str:
        return repr(self.read("repr"))

    def __str__(self) -> str:
        return str(self.read("str"))


def report_whole_read(why: str, read: Iterable[object]) -> None:
    """One line about an operation that needs the whole of what is read, once for each line of the script."""
    worker = torch.utils.data.get_worker_info()
    lines = list(program_lines(sys._getframe(1)))
    place = next((line for line, own in lines if own), lines[0][0] if lines else "a DataLoader")
    if (place, why) not in _reported and (worker is None or worker.id == 0):
        _reported.add((place, why))
        source = next((f" of {source}" for source in read), "")
        print_line(f"distconv: {place}: {why} needs the whole{source}: every rank reads all of it")
