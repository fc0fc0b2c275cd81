"""Expressions: trees of what to read and what to compute from it. Any region of the result can be computed by itself.

Pure, apart from reading, which the caller does.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch

from distconv.reading.source import Source
from distconv.reading.view import Arrangement, Region, View, slices

Fetch = Callable[[Source, Region], numpy.ndarray]  # Reads a region of an array in a file.


class Expression(abc.ABC):
    """A part of the tree. Its regions are NumPy's arrays where `dtype` is NumPy's, else torch's tensors on the CPU."""

    shape: tuple[int, ...]
    dtype: Any
    children: tuple[Expression, ...] = ()  # The expressions of which it is made.

    @property
    def of_torch(self) -> bool:
        return isinstance(self.dtype, torch.dtype)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self, wanted: Region, fetch: Fetch) -> Any:
        """The elements of a region."""
        if not all(map(len, wanted)):
            return empty_array([len(positions) for positions in wanted], self.dtype)
        return self._read(wanted, fetch)

    def needs(self, wanted: Region) -> Iterator[tuple[Source, Region]]:
        """The parts of sources that `read` of the region fetches."""
        if all(map(len, wanted)):
            yield from self._needs(wanted)

    @abc.abstractmethod
    def _read(self, wanted: Region, fetch: Fetch) -> Any: ...

    def _needs(self, wanted: Region) -> Iterator[tuple[Source, Region]]:
        for child in self.children:
            yield from child.needs(wanted)

    def described(self) -> Iterator[str]:
        """The sources and operators of the expression, as text. Ranks that read the same data get the same text."""
        for child in self.children:
            yield from child.described()

    def sources(self) -> Iterator[Source]:
        for child in self.children:
            yield from child.sources()


def whole_region(shape: Sequence[int]) -> Region:
    """The region of all elements."""
    return tuple(map(range, shape))


def empty_array(shape: Sequence[int], dtype: Any) -> Any:
    """An array or a tensor, as the dtype is."""
    return torch.empty(*shape, dtype=dtype) if isinstance(dtype, torch.dtype) else numpy.empty(shape, dtype)


def zeros(shape: Sequence[int], dtype: Any) -> Any:
    """An array or a tensor of zeros, as the dtype is."""
    return torch.zeros(*shape, dtype=dtype) if isinstance(dtype, torch.dtype) else numpy.zeros(shape, dtype)


class Stored(Expression):
    """An array as it is in a file."""

    def __init__(self, source: Source) -> None:
        self.source, self.shape, self.dtype = source, source.shape, source.dtype

    def _read(self, wanted: Region, fetch: Fetch) -> Any:
        return fetch(self.source, wanted)

    def _needs(self, wanted: Region) -> Iterator[tuple[Source, Region]]:
        yield self.source, wanted

    def described(self) -> Iterator[str]:
        yield str(self.source)

    def sources(self) -> Iterator[Source]:
        yield self.source


class Viewed(Expression):
    """A view of another expression."""

    def __init__(self, parent: Expression, view: View) -> None:
        self.parent, self.children, self.view = parent, (parent,), view
        self.shape, self.dtype = view.shape, parent.dtype

    def _read(self, wanted: Region, fetch: Fetch) -> Any:
        return arranged(self.parent.read(self.view.region(wanted), fetch), self.view.arrangement(wanted))

    def _needs(self, wanted: Region) -> Iterator[tuple[Source, Region]]:
        yield from self.parent.needs(self.view.region(wanted))

    def described(self) -> Iterator[str]:
        yield from super().described()
        yield f"{self.view.dims}{self.view.fixed}"


def arranged(array: Any, how: Arrangement) -> Any:
    """An array or a tensor, as an arrangement says."""
    array = array[tuple(0 if dim in how.dropped else slice(None) for dim in range(array.ndim))]
    if isinstance(array, torch.Tensor):
        array = array.flip(how.flipped) if how.flipped else array
        array = array.permute(how.order)
    else:
        array = numpy.flip(array, how.flipped).transpose(how.order)
    for dim in how.new:
        array = array[(slice(None),) * dim + (None,)]
    return array


class Converted(Expression):
    """The same elements as a torch tensor instead of a NumPy array, or the other way round."""

    def __init__(self, parent: Expression) -> None:
        self.parent, self.children, self.shape = parent, (parent,), parent.shape
        if parent.of_torch:
            self.dtype = torch.empty(0, dtype=parent.dtype).numpy().dtype
        else:
            self.dtype = torch.from_numpy(numpy.empty(0, parent.dtype)).dtype

    def _read(self, wanted: Region, fetch: Fetch) -> Any:
        array = self.parent.read(wanted, fetch)
        if isinstance(array, torch.Tensor):
            return array.numpy()
        # What torch shares memory with has no steps backwards, and may be written to.
        return torch.from_numpy(numpy.require(array, requirements=["C", "W"]).reshape(array.shape))


class Computed(Expression):
    """An elementwise function of operands that broadcast; operands that are no expressions are passed as they are."""

    def __init__(
        self,
        function: Callable[..., Any],
        operands: Sequence[Any],
        shape: Sequence[int],
        dtype: Any,
        name: str,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.function, self.operands, self.name, self.options = function, tuple(operands), name, options or {}
        self.children = tuple(operand for operand in self.operands if isinstance(operand, Expression))
        self.shape, self.dtype = tuple(shape), dtype

    def _read(self, wanted: Region, fetch: Fetch) -> Any:
        parts = []
        for operand in self.operands:
            if isinstance(operand, Expression):
                parts.append(operand.read(_broadcast(operand.shape, wanted), fetch))
            elif isinstance(operand, numpy.ndarray | torch.Tensor) and operand.ndim:
                parts.append(operand[slices(_broadcast(operand.shape, wanted))])
            else:
                parts.append(operand)
        return self.function(*parts, **self.options)

    def _needs(self, wanted: Region) -> Iterator[tuple[Source, Region]]:
        for child in self.children:
            yield from child.needs(_broadcast(child.shape, wanted))

    def described(self) -> Iterator[str]:
        yield self.name
        for operand in self.operands:
            if isinstance(operand, Expression):
                yield from operand.described()
            elif isinstance(operand, numpy.ndarray | torch.Tensor):
                yield f"{tuple(operand.shape)}"


def _broadcast(shape: Sequence[int], wanted: Region) -> Region:
    """The region of an operand of `shape` that a region of the result reads."""
    own = wanted[len(wanted) - len(shape) :]
    return tuple(range(1) if extent == 1 else positions for extent, positions in zip(shape, own, strict=True))


class Joined(Expression):
    """Parts of one dtype, concatenated along a dim; if `stacked`, each part is one position of a new dim."""

    def __init__(self, parts: Sequence[Expression], dim: int, *, stacked: bool) -> None:
        self.parts, self.dim, self.stacked = tuple(parts), dim, stacked
        self.children = self.parts
        first = list(parts[0].shape)
        if stacked:
            first.insert(dim, len(parts))
        else:
            first[dim] = sum(part.shape[dim] for part in parts)
        self.shape, self.dtype = tuple(first), parts[0].dtype

    def _of_parts(self, wanted: Region) -> Iterator[tuple[Expression, Region]]:
        before, along, after = wanted[: self.dim], wanted[self.dim], wanted[self.dim + 1 :]
        if self.stacked:
            for position in along:
                yield self.parts[position], (*before, *after)
            return
        start = 0
        for part in self.parts:
            stop = start + part.shape[self.dim]
            own = [position - start for position in along if start <= position < stop]
            start = stop
            if own:
                yield part, (*before, range(own[0], own[-1] + 1, along.step), *after)

    def _read(self, wanted: Region, fetch: Fetch) -> Any:
        parts = [part.read(region, fetch) for part, region in self._of_parts(wanted)]
        if self.of_torch:
            return (torch.stack if self.stacked else torch.cat)(parts, self.dim)
        return (numpy.stack if self.stacked else numpy.concatenate)(parts, self.dim)

    def _needs(self, wanted: Region) -> Iterator[tuple[Source, Region]]:
        for part, region in self._of_parts(wanted):
            yield from part.needs(region)
