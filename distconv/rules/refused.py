"""Operators whose result depends on the order or number of elements of the whole tensor: refused over shards.

Without a rule here some would answer for the local shard, or fail with an error from deep inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distconv.refusal import refuse
from distconv.rules.registry import rule
from distconv.rules.small import are_small, computed_whole

REFUSED = (
    "nonzero",
    "masked_select",
    "bincount",
    "bincount.weights",
    "median",
    "nanmedian",
    "histc",
    "histogram.bin_ct",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "im2col",
    "col2im",
    "unfold",
    "grid_sampler_2d",
    "grid_sampler_3d",
)


def _refused(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    sharded = [t for t in (x, *args) if isinstance(t, DTensor) and not all(p.is_replicate() for p in t.placements)]
    if sharded and are_small((x, *args)):
        return computed_whole(func, (x, *args), kwargs)
    if sharded:
        raise refuse(
            func,
            f"no rule runs it on a tensor {tuple(sharded[0].shape)} laid out as {sharded[0].placements}."
            f" Use distconv.gather first where that is meant",
        )
    return computed_whole(func, (x, *args), kwargs)


for _name in REFUSED:
    _operator, _, _overload = _name.partition(".")
    if hasattr(torch.ops.aten, _operator) and (
        not _overload or _overload in getattr(torch.ops.aten, _operator).overloads()
    ):
        rule(f"aten::{_name}")(_refused)


@rule("aten::as_strided", "aten::as_strided_", "aten::as_strided_copy", "aten::as_strided_scatter")
def strided(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Strides are those of the whole tensor's memory, which nobody has, and their backward writes to views."""
    raise refuse(func, "strides of a distributed tensor; accepted: slices, select, unfold, view")


@rule("aten::allclose")
def allclose(
    func: Any, x: DTensor, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Whether all elements of the whole tensors are close."""
    close: Any = torch.isclose(x, other, rtol, atol, equal_nan).all()
    return bool(close._local_tensor)
