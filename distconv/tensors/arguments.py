"""Tensors among the arguments of a function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

X = TypeVar("X")


def each_of(kind: type[X], values: Iterable[Any]) -> Iterator[X]:
    """All that are of a class among some values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, list | tuple):
            yield from each_of(kind, value)
