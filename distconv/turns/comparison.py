"""Compares what the parts of a call have made of the values that they share, or of their own copies."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Container
from typing import Any

import numpy as np
from torch import Tensor, nn

from distconv.turns.value_kinds import ValueKind
from distconv.turns.values_of_parts import are_equal

MOST = 1_000  # The most items of a list that are compared among parts.

SAMPLE = 1 << 13
"""About how many elements of an array that parts share are compared, besides their sum, to find changes of it."""


def digest(array: Any) -> tuple[bytes, int]:
    """A sample of an array's elements, and the sum of all its bytes as integers, which takes some 0.15 s for each GiB.

    Arrays of objects, and arrays in files, which would be read whole, have the sum 0.
    """
    found = array.flat[:: max(array.size // SAMPLE, 1)].tobytes()
    if array.dtype.hasobject or isinstance(array, np.memmap):
        return found, 0
    text = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return found, int(text[: text.size // 8 * 8].view(np.uint64).sum()) + int(text[text.size // 8 * 8 :].sum())


def contents_of(value: Any) -> Any:
    """What changes of an array or an iterator show, to be compared by equality. An iterator that does not say where it
    is, such as a generator, always seems to have changed."""
    if isinstance(value, np.ndarray):
        return digest(value)
    if not hasattr(value, "__next__"):
        return bytes(value)
    try:
        with warnings.catch_warnings(action="ignore"):
            _, *found = value.__reduce__()
    except TypeError:
        return object()
    return _place(found)


def _place(state: Any) -> Any:
    """Where an iterator is: its numbers, those of iterators within it, and the identity of what it goes through."""
    if isinstance(state, tuple | list):
        return [*map(_place, state)] if len(state) < MOST else (id(state), len(state))
    if hasattr(state, "__next__"):
        return contents_of(state)
    return state if isinstance(state, bool | int | float | str) else id(state)


def agree(a: Any, b: Any) -> bool:
    """Whether two parts have made the same of a value, each in the form of `comparable`."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(agree, a, b))
    return are_equal(a, b)


def comparable(kind: ValueKind, x: Any, known: Container[int]) -> Any:
    """What must be equal in all parts of a value that they have changed, for `agree`; None if nothing must.

    ``known``: the ids of the part's copies of tensors, which are compared elsewhere.
    """
    if kind is ValueKind.CONTAINER:
        items = x.values() if isinstance(x, dict) else [] if isinstance(x, set) else x
        return [
            len(x),
            *(
                item if type(item) is Tensor and id(item) not in known else None
                for item in itertools.islice(items, MOST)
            ),
        ]
    if type(x) is Tensor and id(x) not in known:
        return x
    return (type(x), repr(x)) if x is None or isinstance(x, bool | int | float | str) else None


def tensors_of(registered: Any) -> list[Tensor]:
    """The parameters of a module, or the parameter itself."""
    if isinstance(registered, nn.Module):
        return list(registered.parameters())
    return [] if registered is None else [registered]


def are_same(a: Any, b: Any) -> bool:
    """Whether two parts have registered equal values, or modules with equal parameters."""
    if type(a) is not type(b) or not isinstance(a, nn.Module):
        return are_equal(a, b)
    mine, others = dict(a.named_parameters()), dict(b.named_parameters())
    return a is b or (list(mine) == list(others) and all(are_equal(x, others[name]) for name, x in mine.items()))
