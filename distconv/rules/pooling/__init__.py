"""Pooling: maximum and average windows, and adaptive ones, with samples and space sharded.

``window`` and ``adaptive`` hold the rules; ``positions`` what the indices of a maximum mean; ``operator`` what both ask
of an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.pooling import window as _window
from distconv.rules.pooling.operator import adaptive
from distconv.rules.registry import rule

RULES = (_window,)
"""The modules whose import registers the rules: this one imports the adaptive pools."""


@rule(
    *(f"aten::max_pool{dims}d" for dims in (1, 2, 3)),
    *(f"aten::{name}_pool1d" for name in ("avg", "adaptive_avg", "adaptive_max")),
    "aten::max_pool1d_with_indices",
)
def composite(func: Any, *arguments: Any) -> Any:
    """In inference mode these do not fall apart before they reach a DTensor."""
    return func.decompose(*arguments)


def _whole_averages(spatial: int) -> Any:
    """`aten::adaptive_avg_poolNd` falls apart above DTensor, into a mean where the output size is 1."""
    operator, inner = getattr(torch.ops.aten, f"adaptive_avg_pool{spatial}d").default, adaptive("avg", spatial)

    def pool(x: Tensor, size: Sequence[int]) -> Tensor:
        return inner(x, size) if isinstance(x, DTensor) else operator.decompose(x, size)

    rule(f"aten::adaptive_avg_pool{spatial}d")(lambda _, x, size: inner(x, size))
    return pool


_library = torch.library.Library("aten", "IMPL")
for _spatial in (2, 3):
    _pool = _whole_averages(_spatial)
    for _key in ("AutogradCPU", "AutogradCUDA"):
        _library.impl(f"adaptive_avg_pool{_spatial}d", _pool, _key)
