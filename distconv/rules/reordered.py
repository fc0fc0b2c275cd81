"""Views that contain every element of their tensor, on the rank where it lies: the same dims, or in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor, Shard

from distconv.dtensors import wrap_strided
from distconv.rules.registry import rule


@rule("aten::detach", "aten::alias")
def same(func: Any, x: DTensor) -> DTensor:
    """x without its graph."""
    return wrap_strided(func(x._local_tensor), x.device_mesh, x.placements, x.shape, x.stride())


@rule("aten::t")
def transposed(func: Any, x: DTensor) -> DTensor:
    """A matrix with its dims exchanged; a vector as it is."""
    return _in_order(x, range(func(x._local_tensor).dim())[::-1])


@rule("aten::transpose.int")
def exchanged(func: Any, x: DTensor, one: int, other: int) -> DTensor:
    """x with two dims exchanged."""
    local = func(x._local_tensor, one, other)  # which raises where a dim is none
    order = list(range(local.dim()))
    if order:
        order[one], order[other] = order[other], order[one]
    return _in_order(x, order)


@rule("aten::permute")
def permuted(func: Any, x: DTensor, dims: Sequence[int]) -> DTensor:
    """x with its dims in another order."""
    return _in_order(x, [dim % x.dim() for dim in dims])


def _in_order(x: DTensor, order: Sequence[int]) -> DTensor:
    after = [type(p)(order.index(p.dim)) if isinstance(p, Shard) else p for p in x.placements]
    shape, strides = ([of[dim] for dim in order] for of in (x.shape, x.stride()))
    return wrap_strided(x._local_tensor.permute(tuple(order)), x.device_mesh, after, shape, strides)


@rule("aten::unsqueeze")
def unsqueeze(func: Any, x: DTensor, dim: int) -> DTensor:
    """x with one more dim, of extent 1."""
    local = func(x._local_tensor, dim)
    dim %= local.dim()
    shape, strides = list(x.shape), list(x.stride())
    after = [Shard(p.dim + 1) if isinstance(p, Shard) and p.dim >= dim else p for p in x.placements]
    strides.insert(dim, shape[dim] * strides[dim] if dim < x.dim() else 1)
    shape.insert(dim, 1)
    return wrap_strided(local, x.device_mesh, after, shape, strides)
