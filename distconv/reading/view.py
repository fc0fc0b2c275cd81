"""Views: which elements of an array a view shows, and in which order. Pure."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Region = tuple[range, ...]  # The positions that are wanted along every dim, ascending.


@dataclass(frozen=True)
class View:
    """Slices, chosen indices, flips, transposes and dims of extent 1, one after another, of an array."""

    dims: tuple[tuple[int, range] | None, ...]
    """For every dim of the view the dim of the array and the positions along it; None for a new dim of extent 1."""
    fixed: tuple[tuple[int, int], ...] = ()  # (dim of the array, position) of the dims that the view has not.

    @classmethod
    def of_strides(cls, whole: Sequence[int], shape: Sequence[int], strides: Sequence[int], first: int) -> View | None:
        """What an array shows of a contiguous one of the shape `whole`, whose memory it shares; None where that is more
        than a view is.

        ``strides``, ``first``: in elements, as of the other one; and the element of it that is the first.
        """
        if not all(shape):
            return cls(tuple((-1, range(extent)) for extent in shape))  # no array has to be read for it
        steps = contiguous_strides(whole)
        fixed = {}
        for dim, step in enumerate(steps):
            fixed[dim], first = divmod(first, step)
        dims: list[tuple[int, range] | None] = []
        for extent, stride in zip(shape, strides, strict=True):
            if extent == 1:
                dims.append(None)
                continue
            dim = next((dim for dim in fixed if whole[dim] > 1 and steps[dim] <= abs(stride)), -1)
            if dim < 0 or stride % steps[dim]:
                return None
            start, step = fixed.pop(dim), stride // steps[dim]
            last = start + (extent - 1) * step
            if not 0 <= last < whole[dim]:
                return None
            dims.append((dim, range(start, last + (1 if step > 0 else -1), step)))
        return cls(tuple(dims), tuple(fixed.items()))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if dim is None else len(dim[1]) for dim in self.dims)

    def region(self, wanted: Region) -> Region:
        """The region of the array that contains a region of the view, which has elements."""
        positions: dict[int, range] = {dim: range(at, at + 1) for dim, at in self.fixed}
        for dim, chosen in zip(self.dims, wanted, strict=True):
            if dim is not None:
                positions[dim[0]] = _ascending(_of(dim[1], chosen))
        return tuple(positions[dim] for dim in range(len(positions)))

    def arrangement(self, wanted: Region) -> Arrangement:
        """How what was read of `region(wanted)` becomes that part of the view."""
        kept = [(place, dim) for place, dim in enumerate(self.dims) if dim is not None]
        in_order = sorted(kept, key=lambda each: each[1][0])
        after = {place: at for at, (place, _) in enumerate(in_order)}
        return Arrangement(
            tuple(sorted(dim for dim, _ in self.fixed)),
            tuple(at for at, (place, dim) in enumerate(in_order) if _of(dim[1], wanted[place]).step < 0),
            tuple(after[place] for place, _ in kept),
            tuple(place for place, dim in enumerate(self.dims) if dim is None),
        )


@dataclass(frozen=True)
class Arrangement:
    """What is done to an array, in this order: dims of extent 1 go, dims are flipped, permuted, and new ones follow."""

    dropped: tuple[int, ...]
    flipped: tuple[int, ...]
    order: tuple[int, ...]
    new: tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous array, in elements."""
    steps = itertools.accumulate((max(extent, 1) for extent in reversed(shape)), operator.mul, initial=1)
    return [*steps][-2::-1]


def plain_index(key: Any) -> tuple[Any, ...] | None:
    """An index of numbers, slices, an ellipsis and new dims alone, with an ellipsis, so that it gives no element but an
    array; None for any other."""
    keys = key if isinstance(key, tuple) else (key,)
    if not all(each is None or each is Ellipsis or isinstance(each, slice) or _is_number(each) for each in keys):
        return None
    bounds = (bound for each in keys if isinstance(each, slice) for bound in (each.start, each.stop, each.step))
    if not all(bound is None or _is_number(bound) for bound in bounds):
        return None
    plain = tuple(operator.index(each) if _is_number(each) else each for each in keys)
    return plain if Ellipsis in plain else (*plain, ...)


def _is_number(key: Any) -> bool:
    if isinstance(key, bool) or str(getattr(key, "dtype", "")).endswith("bool"):  # a mask
        return False
    return isinstance(key, int) or (hasattr(type(key), "__index__") and getattr(key, "ndim", 0) == 0)


def slices(region: Region) -> tuple[slice, ...]:
    """The index that chooses a region of an array."""
    return tuple(slice(at.start, at.stop, at.step) for at in region)


def _of(positions: range, chosen: range) -> range:
    return positions[chosen.start : chosen.stop : chosen.step]


def _ascending(positions: range) -> range:
    return positions if positions.step > 0 else positions[::-1]
