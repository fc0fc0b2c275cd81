"""Nested tensors (`torch.nested`) of distributed ones: they are refused in one line.

Torch makes them of the memory of their parts, beneath the rules of distributed tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from distconv.tensors.mesh import is_ours
from distconv.tensors.refusal import complete, operands_of, refuse
from distconv.tensors.replacements import replace, until_put_back
from distconv.tensors.user_lines import asked_for

MAKERS = ("as_nested_tensor", "masked_select", "narrow", "nested_tensor", "nested_tensor_from_jagged")

WHY = "a nested tensor has no shards; accepted: parts of whole tensors, as distconv.gather gives"


@until_put_back
def refuse_nested_tensors() -> None:
    """Makes the functions `MAKERS` of `torch.nested` say, from now on, that they cannot take shards."""
    for name in MAKERS:
        replace(torch.nested, name, _refusing(f"torch.nested.{name}", getattr(torch.nested, name)))


def _refusing(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def make(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor) and is_ours(x.device_mesh)]
        if tensors:
            raise complete(refuse(name, WHY), name, operands_of(tensors), asked_for)
        return stock(*args, **kwargs)

    return make
