"""Flat positions in a box of spatial dims, as max pools return them: in a shard's box and in the whole input's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def coordinates(index: Tensor, box: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """(dim of the box, position along it) of flat positions, the last dim first."""
    for at in reversed(range(len(box))):
        yield at, index % box[at]
        index = index.div(box[at], rounding_mode="floor")


def moved(index: Tensor, box: Sequence[int], starts: Sequence[int], into: Sequence[int], clamp: bool = False) -> Tensor:
    """Flat positions in a box, as flat positions in the box ``into``, where the first one begins at ``starts``.

    ``clamp`` moves what lies outside ``into`` to its edge.
    """
    if tuple(box[1:]) == tuple(into[1:]) and not any(starts[1:]):
        offset = starts[0] * math.prod(into[1:])
        index = index + offset if offset else index
        return index.clamp_(0, math.prod(into) - 1) if clamp and index.numel() else index
    result, step = torch.zeros_like(index), 1
    for at, position in coordinates(index, box):
        position += starts[at]
        result.add_(position.clamp_(0, into[at] - 1) if clamp else position, alpha=step)
        step *= into[at]
    return result


def placed(index: Tensor, box: Sequence[int], shard: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """(flat positions in the shard that owns these intervals of a box, which of the positions lie in it).

    Those that lie outside are given position 0.
    """
    place, here, step = torch.zeros_like(index), torch.ones_like(index, dtype=torch.bool), 1
    for at, position in coordinates(index, box):
        start, stop = shard[at]
        here &= (position >= start) & (position < stop)
        place.add_(position - start, alpha=step)
        step *= stop - start
    return torch.where(here, place, 0), here
