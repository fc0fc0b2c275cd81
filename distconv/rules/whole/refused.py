"""Operators whose result depends on the order or number of elements of the whole tensor: refused over shards.

Without a rule here some would answer for the local shard, or fail with an error from deep inside.
"""

from __future__ import annotations

from typing import Any

from distconv.rules.registry import rule
from distconv.rules.schemas import operator
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


rule(*(f"aten::{name}" for name in REFUSED if operator(name) is not None))(_refused)


@rule(
    *("aten::_to_sparse", "aten::_to_sparse.sparse_dim", "aten::_to_sparse_csr", "aten::_to_sparse_csc"),
    *("aten::_to_sparse_bsr", "aten::_to_sparse_bsc"),
)
def sparse(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Refused: the number of a rank's elements of a sparse tensor depends on their values."""
    raise refuse(func, "a sparse tensor of a sharded one; accepted: dense tensors, or distconv.gather first")
