"""Functions that `torch.jit.script` or `torch.cond` compiles: the Python function runs in their place.

The interpreter of TorchScript calls operators beneath Python, where the rules of distributed tensors are not reached.
`torch.cond` outside of a graph compiles the functions that it chooses from, to an operator that knows no such tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from distconv.private_names import SCRIPTED_CALLS, lacks
from distconv.tensors.mesh import is_ours
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.replacements import replace, until_put_back


@until_put_back
def call_scripted_functions_in_python() -> None:
    """Makes scripted functions run as the Python functions they were made of where they get distributed tensors.

    `torch.cond` calls one of its functions: all ranks have the same condition, so they call the same one.
    """
    replace(torch, "cond", _choosing(torch.cond))
    if not lacks(SCRIPTED_CALLS):
        replace(torch.jit.ScriptFunction, "__call__", _in_python(torch.jit.ScriptFunction.__call__))


def _in_python(real: Any) -> Any:
    @functools.wraps(real)
    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, DTensor) and is_ours(x.device_mesh) for x in tree_leaves((args, kwargs))):
            return real(function, *args, **kwargs)
        original = getattr(function, "_torchdynamo_inline", None)
        if original is None:
            raise UnsupportedOperation(
                f"{function.name}, a function of torch.jit without a Python function: called with a distributed tensor;"
                " accepted: the functions that torch.jit.script and torch.jit.trace give"
            )
        return original(*args, **kwargs)

    return called


def _choosing(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return stock(pred, true_fn, false_fn, operands)
        return (true_fn if pred else false_fn)(*operands)

    return cond
