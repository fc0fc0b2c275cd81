"""What the rules of pooling read from an operator and its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.tensors.memory_format import memory_format


def spatial_dims(func: Any) -> int:
    """Of a pool, from its name."""
    return int(func._schema.name.partition("pool")[2][0])


def forward_of(func: Any) -> Any:
    """The operator whose backward this is."""
    return getattr(torch.ops.aten, func._schema.name[len("aten::") : -len("_backward")]).default


def adaptive(kind: str, spatial: int, suffix: str = "") -> Any:
    """The operator of an adaptive pool, ``kind`` being "avg" or "max"; ``suffix`` "_backward" names its backward."""
    return getattr(torch.ops.aten, f"{'_' if kind == 'avg' else ''}adaptive_{kind}_pool{spatial}d{suffix}").default


def shaped_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of this shape, of the dtype, device and memory format of x, whose values nobody reads."""
    wanted = memory_format(x)
    if wanted is torch.contiguous_format:
        return x.new_empty(1).expand(tuple(shape))
    return torch.empty(tuple(shape), dtype=x.dtype, device=x.device, memory_format=wanted)
