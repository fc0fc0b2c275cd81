"""Views: which elements of an array a view shows, and in which order. Pure."""

from __future__ import annotations

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
    def whole(cls, shape: Sequence[int]) -> View:
        return cls(tuple((dim, range(extent)) for dim, extent in enumerate(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if dim is None else len(dim[1]) for dim in self.dims)

    def index(self, key: Any) -> View | None:
        """What `key` shows of this view; None where it is more than numbers, slices, an ellipsis and new dims.

        IndexError as NumPy raises it.
        """
        keys = key if isinstance(key, tuple) else (key,)
        if not all(_is_basic(each) for each in keys):
            return None
        taken = sum(each is not None and each is not Ellipsis for each in keys)
        gaps = sum(each is Ellipsis for each in keys)
        if gaps > 1:
            raise IndexError("an index can only have a single ellipsis ('...')")
        if taken > len(self.dims):
            raise IndexError(
                f"too many indices for array: array is {len(self.dims)}-dimensional, but {taken} were indexed"
            )
        at = next((place for place, each in enumerate(keys) if each is Ellipsis), len(keys))
        rest = (slice(None),) * (len(self.dims) - taken)
        dims: list[tuple[int, range] | None] = []
        fixed = list(self.fixed)
        ours = iter(enumerate(self.dims))
        for each in (*keys[:at], *rest, *keys[at + 1 :]):
            if each is None:
                dims.append(None)
                continue
            place, dim = next(ours)
            positions = range(1) if dim is None else dim[1]
            if isinstance(each, slice):
                chosen = positions[each]
                # A new dim stays one, or becomes a dim without elements, which no array has to be read for.
                dims.append((dim[0], chosen) if dim is not None else None if len(chosen) else (-1, chosen))
                continue
            try:
                position = positions[operator.index(each)]
            except IndexError:
                raise IndexError(
                    f"index {operator.index(each)} is out of bounds for axis {place} with size {len(positions)}"
                ) from None
            if dim is not None and dim[0] >= 0:
                fixed.append((dim[0], position))
        return View(tuple(dims), tuple(fixed))

    def permute(self, order: Sequence[int]) -> View:
        """The dims in another order."""
        return View(tuple(self.dims[dim] for dim in order), self.fixed)

    def flip(self, dims: Sequence[int]) -> View:
        """The elements in the opposite order along some dims."""
        chosen = set(dims)
        return View(
            tuple(
                (dim[0], dim[1][::-1]) if dim is not None and place in chosen else dim
                for place, dim in enumerate(self.dims)
            ),
            self.fixed,
        )

    def refit(self, shape: Sequence[int]) -> View | None:
        """In another shape, where that only adds and drops dims of extent 1; None elsewhere."""
        if [extent for extent in shape if extent != 1] != [extent for extent in self.shape if extent != 1]:
            return None
        kept = self.index(tuple(0 if extent == 1 else slice(None) for extent in self.shape))
        return kept and kept.index(tuple(None if extent == 1 else slice(None) for extent in shape))

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


def _is_basic(key: Any) -> bool:
    if key is None or key is Ellipsis:
        return True
    if isinstance(key, slice):
        return all(each is None or _is_number(each) for each in (key.start, key.stop, key.step))
    return _is_number(key)


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
