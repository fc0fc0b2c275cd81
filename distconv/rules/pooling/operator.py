"""Properties of a pooling operator and of its input, for the rules of pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from distconv.rules.schemas import name_of, operator
from distconv.tensors.dtensors import memory_format, wrap
from distconv.transfer.local_part import local_as


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
