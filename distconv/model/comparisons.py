"""Comparisons of positions within a model's call: a large table that they begin is computed in the parts that are read.

A model compares all positions with all, as in `i[:, None] >= i`, and makes an attention mask of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distconv.model.direct.paths import is_open
from distconv.model.running import inside
from distconv.tensors.deferred import begins, deferred
from distconv.tensors.replacements import replace, until_put_back

COMPARISONS = ("le", "lt", "ge", "gt", "eq", "ne")


@until_put_back
def open_comparisons() -> None:
    """Makes tensors compare so from now on, with operators of Python."""
    for name in COMPARISONS:
        method = f"__{name}__"
        replace(Tensor, method, _comparing(getattr(Tensor, method), getattr(torch.ops.aten, name).Tensor))


def _comparing(stock: Callable[[Any, Any], Any], operator: Any) -> Callable[[Any, Any], Any]:
    @functools.wraps(stock)
    def compared(x: Any, other: Any) -> Any:
        run = inside.run
        if run is not None and run.direct and begins(x, other) and is_open():
            found = deferred(operator, (x, other), {})
            if found is not None:
                return found
        return stock(x, other)

    return compared
