"""Functions of distconv that torch.compile leaves alone: a graph of the program's functions ends where it calls one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from distconv.private_names import COMPILED, lacks


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch.compile is to call it, with all that it calls: without a trace."""

    def called(*args: Any, **kwargs: Any) -> Any:  # a method could not keep what torch writes to it
        return function(*args, **kwargs)

    return torch.compiler.disable(called) if lacks(COMPILED) else _disable_dynamo(called)
