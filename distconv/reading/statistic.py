"""Statistics: numbers that summarise a whole array, such as a mean or a percentile, and the functions for them.

They stay open while a Dataset makes a sample. Afterwards each of the ranks that share the sample reads a slab, and one
of them computes the number from all slabs, with the same function that the program called.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from distconv.reading.expression import (
    Computed,
    Converted,
    Expression,
    Fetch,
    Joined,
    Stored,
    Viewed,
    whole_region,
    zeros,
)
from distconv.reading.source import Source, depth
from distconv.reading.view import Region, slices

LARGEST = 4096  # Elements of a result above which the array is read whole at once.

_QUANTILES = ("percentile", "quantile", "nanpercentile", "nanquantile")
"""Functions whose result begins with the dims of their first argument after the array."""


class Statistic(Expression):
    """The result of a NumPy or torch function of a whole array. `value` is None until it is known.

    Attributes:
        parent: the array.
        digest: a text that differs if the file, the part of it, the operations or the function differ.
    """

    def __init__(
        self, parent: Expression, strides: Sequence[int] | None, name: str, args: Any, options: dict[str, Any]
    ) -> None:
        self.parent, self.children, self.name, self.args, self.options = parent, (parent,), name, args, options
        self._strides = None if strides is None else tuple(strides)
        # Extents by which the dims differ: what is left of them says which dims the result has.
        tried = self._call(zeros(range(2, 2 + len(parent.shape)), parent.dtype))
        lead = numpy.shape(args[0] if args else options["q"]) if name in _QUANTILES else ()
        rest = tuple(tried.shape)[len(lead) :]
        self.shape = (*lead, *(parent.shape[extent - 2] if extent > 1 else 1 for extent in rest))
        self.dtype = tried.dtype
        self.value: Any = None
        text = f"{name} {digest_text(args)} {digest_text(options)} {self._strides} {digest_text(parent)}"
        self.digest = hashlib.sha1(text.encode()).hexdigest()

    def _call(self, array: Any) -> Any:
        return getattr(Tensor if self.parent.of_torch else numpy, self.name)(array, *self.args, **self.options)

    def compute(self, array: Any) -> Any:
        """The number or numbers, from the whole parent, laid out in memory as the program's array would be."""
        if self._strides is None:
            return self._call(array)
        if self.parent.of_torch:
            return self._call(torch.empty_strided(array.shape, self._strides, dtype=array.dtype).copy_(array))
        ends = [(extent - 1) * stride for extent, stride in zip(array.shape, self._strides, strict=True)]
        room = numpy.empty(sum(map(abs, ends)) + array.itemsize, numpy.uint8)
        first = -sum(end for end in ends if end < 0)
        laid: Any = numpy.ndarray(array.shape, array.dtype, room.data, first, self._strides)
        laid[...] = array
        return self._call(laid)

    def _read(self, wanted: Region, fetch: Fetch) -> Any:
        if self.value is None:
            self.value = self.compute(_read_whole(self.parent, fetch))
        value = self.value.clone() if self.of_torch else numpy.array(self.value)  # a program may write into it
        return value[slices(wanted)]

    def _needs(self, wanted: Region) -> Iterator[tuple[Source, Region]]:
        yield from ()  # the ranks read it together

    def described(self) -> Iterator[str]:
        yield f"{self.name} {self.args} {self.options}"
        yield from super().described()


def digest_text(value: Any) -> str:
    """A text that differs between two values where something else is read or computed."""
    if isinstance(value, Stored):
        return f"{value.source!r}{value.source.stamp()}"
    if isinstance(value, Viewed):
        return f"view {value.view} of {digest_text(value.parent)}"
    if isinstance(value, Converted):
        return f"converted {digest_text(value.parent)}"
    if isinstance(value, Joined):
        return f"joined {value.dim} {value.stacked} {digest_text(value.parts)}"
    if isinstance(value, Computed):
        return f"{value.name} {digest_text(value.operands)} {digest_text(value.options)}"
    if isinstance(value, Statistic):
        return value.digest
    if isinstance(value, Tensor):
        return f"torch {digest_text(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())}{value.dtype}"
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype}{value.shape}{hashlib.sha1(numpy.ascontiguousarray(value).tobytes()).hexdigest()}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(digest_text, value))})"
    if isinstance(value, dict):
        return digest_text(sorted((name, digest_text(each)) for name, each in value.items()))
    return f"{type(value).__name__} {value!r}"


def statistics_in(expression: Expression) -> Iterator[Statistic]:
    """The statistics that must be known before a region of the expression can be computed, inner ones first."""
    for child in expression.children:
        yield from statistics_in(child)
    if isinstance(expression, Statistic):
        yield expression


def is_of_statistics(expression: Expression) -> bool:
    """Whether all of it is computed from statistics."""
    if isinstance(expression, Statistic):
        return True
    return bool(expression.children) and all(map(is_of_statistics, expression.children))


def is_known(expression: Expression) -> bool:
    """Whether all of it is computed from statistics that are known."""
    return is_of_statistics(expression) and all(each.value is not None for each in statistics_in(expression))


class Known:
    """Statistics of the samples that are being made."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values  # The values that were found before, by digest.
        self.asked: list[tuple[tuple[Any, ...], Statistic]] = []
        """What the program asked for, with the indices of the samples that were being made."""
        self.wholes: dict[str, Any] = {}
        self._samples: tuple[Any, ...] = ()

    def begin(self, *samples: Any) -> None:
        """Begins these samples: statistics that are requested from now on belong to them."""
        self._samples, self.wholes = samples, {}

    def ask(self, statistic: Statistic) -> None:
        statistic.value = self.values.get(statistic.digest)
        self.asked.append((self._samples, statistic))

    def found(self) -> list[tuple[Any, str, Any]]:
        """The index of a sample, the digest and the value of each statistic that was asked for and is known."""
        return [
            (sample, each.digest, each.value)
            for samples, each in self.asked
            if each.value is not None
            for sample in samples
        ]


def _read_whole(parent: Expression, fetch: Fetch) -> Any:
    """The whole array, for a statistic that the program needs at once; kept for others until the next sample."""
    if _current.known is None:
        return parent.read(whole_region(parent.shape), fetch)
    wholes, key = _current.known.wholes, digest_text(parent)
    if key not in wholes:
        wholes[key] = parent.read(whole_region(parent.shape), fetch)
    return wholes[key]


class _Current(threading.local):
    known: Known | None = None


_current = _Current()


@contextlib.contextmanager
def asking(known: Known | None) -> Iterator[None]:
    """A context in which this thread leaves statistics of lazy arrays open; with None it does not."""
    before, _current.known = _current.known, known
    try:
        yield
    finally:
        _current.known = before


def are_left_open() -> bool:
    return _current.known is not None and depth.value > 0


def asked(parent: Expression, strides: Sequence[int] | None, name: str, args: Any, options: dict[str, Any]) -> Any:
    """A statistic that a program asks for, open where its value is not known; NotImplemented where it cannot be one.

    Raises what the function raises for arrays of this dtype and number of dims.
    """
    known = _current.known
    if known is None or not are_left_open() or not _is_plain((*args, *options.values())) or not parent.size:
        return NotImplemented
    made = Statistic(parent, strides, name, args, options)
    if int(numpy.prod(made.shape)) > LARGEST:
        return NotImplemented
    known.ask(made)
    return made


def _is_plain(values: Sequence[Any]) -> bool:
    """Whether arguments are numbers, texts and small arrays of numbers, which a digest distinguishes."""
    return all(
        value is None
        or isinstance(value, bool | int | float | str | numpy.generic | numpy.dtype | torch.dtype | type)
        or (isinstance(value, tuple | list) and _is_plain(value))
        or (type(value) in (numpy.ndarray, Tensor) and value.ndim < 2 and len(value.reshape(-1)) <= LARGEST)
        for value in values
    )
