"""Functions that `torch.jit.script` compiled, called with distributed tensors: the Python function runs in their place.

The interpreter of TorchScript calls operators beneath Python, where the rules of distributed tensors are not reached.
"""

from __future__ import annotations

import functools
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
    """Makes scripted functions run as the Python functions they were made of where they get distributed tensors."""
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
