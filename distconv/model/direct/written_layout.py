"""The layout of a new tensor when a sharded tensor is written to it, or to a view of it: it is sharded likewise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes

STRIDES = 10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079
"""Primes, so that the strides of a view show from which dims of its base it is made."""


def written_layout(
    shape: Sequence[int],
    views: Sequence[Callable[[Tensor], Tensor]],
    index: Any,
    placements: Sequence[Placement],
    written: Sequence[int],
) -> tuple[Placement, ...] | None:
    """The layout of a tensor if a sharded tensor is written to a view of it; None if the dims do not correspond.

    Args:
        shape: the shape of the tensor.
        views: functions that make the view, one after the other.
        index: the index within the view, if only some of its positions are written.
        placements: the placements of the written tensor.
        written: its shape, which broadcasts to that of the view.
    """
    if len(shape) > len(STRIDES):
        return None
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        view = torch.empty_strided(tuple(shape), STRIDES[: len(shape)], dtype=torch.int8, device="meta")
        for make in views:
            view = make(view)
        view = view[_without_lists(index)]
    found: list[Placement] = []
    for placement in placements:
        if not isinstance(placement, Shard):
            found.append(Replicate())
            continue
        dim = placement.dim + view.dim() - len(written)
        if dim < 0 or view.shape[dim] != written[placement.dim]:
            return None
        found.append(Shard(next(of for of, stride in enumerate(STRIDES) if view.stride(dim) % stride == 0)))
    return tuple(found)


def _without_lists(index: Any) -> tuple[Any, ...]:
    """An index with the same dims in its result, but of extent 1 where lists or tensors select positions."""
    found: list[Any] = []
    is_first = True
    for item in index if isinstance(index, tuple) else (index,):
        if item is None or item is ... or isinstance(item, int | slice):
            found.append(item)
            continue
        numbers = item if isinstance(item, Tensor) else torch.as_tensor(item)
        dims = numbers.dim() if numbers.dtype in (torch.bool, torch.uint8) else 1
        if is_first and numbers.dim():
            found.append(None)
            is_first = False
        found += [0] * dims
    return tuple(found)
