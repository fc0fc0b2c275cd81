"""What torch computes beneath the rules of distributed tensors: with shards it is refused in one line.

Operators of functions, such as `flex_attention` and `while_loop`, are higher-order operators to torch. None has a
schema, and they do not reach the rules. Nested tensors (`torch.nested`) are made of the memory of their parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from distconv.private_names import UNRULED, lacks
from distconv.tensors.mesh import is_ours
from distconv.tensors.refusal import UnsupportedOperation, complete, operands_of, refuse
from distconv.tensors.replacements import replace, until_put_back
from distconv.tensors.user_lines import asked_for

OF_FUNCTIONS = "an operator of functions knows no shards; accepted: the same as plain Python or torch.nn.functional"
NESTED = "a nested tensor has no shards; accepted: parts of whole tensors, as distconv.gather gives"

MAKERS = ("as_nested_tensor", "masked_select", "narrow", "nested_tensor", "nested_tensor_from_jagged")


@until_put_back
def refuse_operators_of_functions() -> None:
    """Makes operators of functions say, from now on, that they cannot run on shards."""
    if lacks(UNRULED):
        return  # torch's own error says less
    stock = HigherOrderOperator.dispatch

    @functools.wraps(stock)
    def dispatch(operator: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        if key == DispatchKey.Python and _get_current_dispatch_mode() is None:
            tensors = _ours(args, kwargs)
            if tensors and DTensor not in operator.python_key_table:
                raise _refusal(operator.name(), OF_FUNCTIONS, tensors)
        return stock(operator, key, *args, **kwargs)

    replace(HigherOrderOperator, "dispatch", dispatch)


@until_put_back
def refuse_nested_tensors() -> None:
    """Makes the functions `MAKERS` of `torch.nested` say, from now on, that they cannot take shards."""
    for name in MAKERS:
        replace(torch.nested, name, _refusing(f"torch.nested.{name}", getattr(torch.nested, name)))


def _refusing(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def make(*args: Any, **kwargs: Any) -> Any:
        if tensors := _ours(args, kwargs):
            raise _refusal(name, NESTED, tensors)
        return stock(*args, **kwargs)

    return make


def _ours(*values: Any) -> list[DTensor]:
    return [x for x in tree_leaves(values) if isinstance(x, DTensor) and is_ours(x.device_mesh)]


def _refusal(name: str, why: str, tensors: list[DTensor]) -> UnsupportedOperation:
    return complete(refuse(name, why), name, operands_of(tensors), asked_for)
