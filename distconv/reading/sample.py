"""The identity of a sample: the number of its data set and its index."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

Sample = tuple[int, Hashable]  # The number of a data set, and the index of one of its samples.


class Numbers:
    """Numbers of data sets, in the order in which they are read."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self._count = itertools.count()

    def __call__(self, dataset: Any) -> int:
        known = self._numbers.get(id(dataset))
        if known is None or known[0]() is not dataset:
            try:
                reference: Callable[[], Any] = weakref.ref(dataset)
            except TypeError:
                reference = lambda: dataset  # noqa: E731
            known = self._numbers[id(dataset)] = reference, next(self._count)
        return known[1]


def sample(number: int, index: Any) -> Sample:
    """The identity of a sample of a data set."""
    known: Hashable = index if isinstance(index, int | str) else repr(index)
    return number, known
