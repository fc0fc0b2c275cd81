"""Which functions have a direct path, and when they may take it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

H = TypeVar("H", bound=Callable[..., Any])

LEAVES: set[Any] = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
"""Functions that get parameters themselves, as leaves of autograd's graph."""

paths: dict[Any, Callable[..., Any]] = {}
"""From torch's function to its direct path, which takes the same arguments, or returns NotImplemented."""

of_parameters: set[Any] = set()
"""Torch's functions whose direct paths are given parameters themselves, and ask for their operands."""


def path(*functions: Any, parameters: bool = False) -> Callable[[H], H]:
    """Registers the decorated function as the direct path of some of torch's functions or methods.

    ``parameters``: whether it takes parameters themselves, not their activations.
    """

    def register(handler: H) -> H:
        paths.update(dict.fromkeys(functions, handler))
        if parameters:
            of_parameters.update(functions)
        return handler

    return register


def takes_place(real: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that takes the place of one of torch's: it gets parameters themselves, and has its path."""
    LEAVES.add(function)
    if real in paths:
        paths[function] = paths[real]
    return function


class _Thread(threading.local):
    uses: Any = None
    """The `distconv.model.uses.Uses` of the outermost call that is running: the tensors that represent parameters."""
    closed = 0  # The number of the script's own autograd functions that are running, which are given DTensors only.
    chain: Any = None
    """The `distconv.model.direct.chains.call.Chain` of the outermost call that is running, if it computes in chains."""
    again = False  # Whether the functions that run now are those of a checkpoint, which computes them again.


running = _Thread()


def is_open() -> bool:
    """Whether a model that begins to run may take direct paths: its functions are neither traced nor transformed."""
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


IN_PLACE = (
    *("__iadd__", "__isub__", "__imul__", "__idiv__", "__ifloordiv__", "__imod__", "__iand__", "__ior__", "__ixor__"),
    *("__ilshift__", "__irshift__", "__setitem__"),
)
"""Names of functions, which are those of torch: `/=` is `__idiv__`, and `**=` is `pow_`."""


def is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE
