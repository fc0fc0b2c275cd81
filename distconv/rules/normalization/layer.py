"""Layer normalization: statistics of each position over the last dims, sharded or not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from distconv.rules.normalization.rows import Over, normalized, statistics
from distconv.rules.normalization.shares import statistics_share
from distconv.rules.operands.own_parts import as_own_part, wrapped
from distconv.rules.registry import above_autograd
from distconv.tensors.layouts import input_layout


@above_autograd("aten::layer_norm")
def layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> DTensor:
    """y of a distributed input, or of a plain one with distributed parameters, whose last dims have this shape."""
    func = torch.ops.aten.layer_norm.default
    mesh, placements = input_layout(func, x, weight, bias)
    lead = x.dim() - len(shape)
    if lead < 0 or list(x.shape[lead:]) != list(shape):
        raise RuntimeError(f"{func}: an input {tuple(x.shape)} does not end in the normalized shape {list(shape)}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and list(vector.shape) != list(shape):
            raise RuntimeError(f"{func}: its {name} has shape {tuple(vector.shape)}; accepted: {tuple(shape)}")
    of_vectors = tuple(
        Shard(p.dim - lead) if isinstance(p, Shard) and p.dim >= lead else Replicate() for p in placements
    )
    summed = [axis for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim < lead]
    local, w, b = (
        as_own_part(x, mesh, placements),
        *(None if vector is None else as_own_part(vector, mesh, of_vectors, summed) for vector in (weight, bias)),
    )
    among = statistics_share(mesh, tuple(placements), tuple(x.shape), tuple(range(lead, x.dim())))
    if among is None and 0 not in shape:  # also of no rows: backward then reads the same parameters on every rank
        y = functional.layer_norm(local, shape, w, b, eps)
    else:
        rows = 1, math.prod(local.shape[:lead]), math.prod(local.shape[lead:])
        mean, variance = statistics(local.reshape(rows), among)
        y = normalized(local, rows, None, None, mean, variance, Over(among, math.prod(shape)), eps)
        y = y if w is None else y * w.to(y.dtype)
        y = y if b is None else y + b.to(y.dtype)
    return wrapped(y, mesh, placements, x.shape)
