"""What the rules of pooling read from an operator and its input, and the flat positions that max pools return.

Positions are in a box of spatial dims: in a shard's box, or in the whole input's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from distconv.rules.schemas import name_of, operator
from distconv.tensors.dtensors import memory_format, wrap
from distconv.transfer.local_part import local_as
from distconv.transfer.tracing import is_traced


def spatial_dims(func: Any) -> int:
    """The number of spatial dims of a pool, from its name."""
    return int(name_of(func).partition("pool")[2][0])


def forward_of(func: Any) -> Any:
    """The operator whose backward this is."""
    return operator(name_of(func).removesuffix("_backward"))


def adaptive(kind: str, spatial: int, suffix: str = "") -> Any:
    """The operator of an adaptive pool, ``kind`` being "avg" or "max"; ``suffix`` "_backward" names its backward."""
    return operator(f"{'_' if kind == 'avg' else ''}adaptive_{kind}_pool{spatial}d{suffix}")


def shaped_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of this shape, of the dtype, device and memory format of x, whose values nobody reads."""
    wanted = memory_format(x)
    if wanted is torch.contiguous_format:
        return x.new_empty(1).expand(tuple(shape))
    return torch.empty(tuple(shape), dtype=x.dtype, device=x.device, memory_format=wanted)


def cut_as_gradient(x: DTensor, grad: Tensor) -> DTensor:
    """x in the layout of its gradient: a slice, where x is whole on every rank beside sharded tensors after it."""
    if not isinstance(grad, DTensor) or x.device_mesh != grad.device_mesh:
        return x
    pairs = zip(x.placements, grad.placements, strict=True)
    target = tuple(of if p.is_replicate() and isinstance(of, Shard) else p for p, of in pairs)
    return x if target == x.placements else wrap(local_as(x, x.device_mesh, target), x.device_mesh, target, x.shape)


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
