"""Which functions have a direct path, and when they may take it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

H = TypeVar("H", bound=Callable[..., Any])

paths: dict[Any, Callable[..., Any]] = {}
"""By torch's function: what is called with its arguments, and returns NotImplemented where it cannot serve."""


def path(*functions: Any) -> Callable[[H], H]:
    """Register the direct path of some of torch's functions, or methods."""

    def register(handler: H) -> H:
        paths.update(dict.fromkeys(functions, handler))
        return handler

    return register


class _Thread(threading.local):
    closed = 0
    """The number of the script's own autograd functions that are running: these see DTensors only."""
    chain: Any = None
    """The `distconv.model.direct.chains.call.Chain` of the outermost call that is running, if it computes in chains."""


running = _Thread()


def is_open() -> bool:
    """Whether a model that begins to run may take direct paths: nobody traces or transforms its functions."""
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
