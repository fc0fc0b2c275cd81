"""Flat positions in a box of spatial dims, as max pools return them: in a shard's box and in the whole input's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from distconv.transfer.tracing import is_traced


def coordinates(index: Tensor, box: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """(dim of the box, position along it) of flat positions, the last dim first."""
    index = _read_from_memory(index)
    for at in range(len(box) - 1, 0, -1):
        yield at, index % box[at]
        index = index.div(box[at], rounding_mode="floor")
    yield 0, index


def _read_from_memory(index: Tensor) -> Tensor:
    """The same flat positions, in a graph through an operator that ends Inductor's symbolic expressions of them.

    Inductor of torch 2.13 derives symbolic expressions of positions from a pool's windows, and fails ("vr must not be
    None for symbol indirect3") when one that was clamped, and depends on a value read in a loop, is divided. Results of
    `torch.where` are values for it, not expressions.
    """
    return torch.where(index < 0, 0, index) if is_traced(index) else index


def moved_positions(
    index: Tensor, box: Sequence[int], starts: Sequence[int], into: Sequence[int], clamp: bool = False
) -> Tensor:
    """Flat positions in a box, as flat positions in the box ``into``, where the first one begins at ``starts``.

    ``clamp`` moves positions outside ``into`` to its edge.
    """
    if tuple(box[1:]) == tuple(into[1:]) and not any(starts[1:]):
        offset = starts[0] * math.prod(into[1:])
        index = index + offset if offset else index
        return index.clamp_(0, math.prod(into) - 1) if clamp and index.numel() else index
    result, step = None, 1
    for at, position in coordinates(index, box):
        position = position + starts[at] if starts[at] else position
        position = position.clamp(0, into[at] - 1) if clamp else position
        result = position if result is None else result.add(position, alpha=step)
        step *= into[at]
    assert result is not None, "a box has dims"
    return result


def placed(index: Tensor, box: Sequence[int], shard: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """(flat positions in the shard that owns these intervals of a box, which of the positions are in it).

    Those outside get position 0.
    """
    place, here, step = torch.zeros_like(index), torch.ones_like(index, dtype=torch.bool), 1
    for at, position in coordinates(index, box):
        start, stop = shard[at]
        here &= (position >= start) & (position < stop)
        place.add_(position - start, alpha=step)
        step *= stop - start
    return torch.where(here, place, 0), here
