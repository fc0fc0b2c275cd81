"""Operators whose result depends on the order or number of elements of the whole tensor: refused over shards.

Without a rule here some would answer for the local shard, or fail with an error from deep inside.
"""

from __future__ import annotations

from typing import Any

import torch

from distconv.rules.registry import rule
from distconv.rules.whole import whole_or_refused
from distconv.tensors.refusal import refuse

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
)


def _refused(func: Any, *args: Any, **kwargs: Any) -> Any:
    return whole_or_refused(func, args, kwargs)


for _name in REFUSED:
    _operator, _, _overload = _name.partition(".")
    if hasattr(torch.ops.aten, _operator) and (
        not _overload or _overload in getattr(torch.ops.aten, _operator).overloads()
    ):
        rule(f"aten::{_name}")(_refused)


@rule(
    *("aten::_to_sparse", "aten::_to_sparse.sparse_dim", "aten::_to_sparse_csr", "aten::_to_sparse_csc"),
    *("aten::_to_sparse_bsr", "aten::_to_sparse_bsc"),
)
def sparse(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Refused: the number of a rank's elements of a sparse tensor depends on their values."""
    raise refuse(func, "a sparse tensor of a sharded one; accepted: dense tensors, or distconv.gather first")
