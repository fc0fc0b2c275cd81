"""Which functions have a direct path, and when they may take it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.model.direct.where import Where

H = TypeVar("H", bound=Callable[..., Any])

LEAVES: set[Any] = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
"""Functions that get parameters as leaves of autograd's graph."""

paths: dict[Any, Callable[..., Any]] = {}
"""By torch's function: what is called with its arguments, and returns NotImplemented where it cannot serve."""

of_parameters: set[Any] = set()
"""Torch's functions whose direct paths are given parameters themselves, and ask for their operands."""


def path(*functions: Any, parameters: bool = False) -> Callable[[H], H]:
    """Register the direct path of some of torch's functions, or methods.

    ``parameters``: whether it takes parameters themselves, not their activations.
    """

    def register(handler: H) -> H:
        paths.update(dict.fromkeys(functions, handler))
        if parameters:
            of_parameters.update(functions)
        return handler

    return register


class Operand(Protocol):
    """What direct paths compute with in place of a parameter; a parameter's activation is one.

    Attributes:
        root: this rank's tensor of it.
        place: the layout.
        changed: whether its DTensor has been changed in place, and the root is not what it was.
    """

    @property
    def root(self) -> Tensor: ...
    @property
    def place(self) -> Where: ...
    @property
    def changed(self) -> bool: ...


class Parameters(Protocol):
    """What functions are given in place of the parameters of a model that runs.

    given_out: the ids of tensors whose `data` the model has asked for, and may have changed without being counted.
    """

    given_out: set[int]

    def __call__(self, parameter: Tensor) -> Tensor:
        """Of a parameter, the activation or DTensor that functions are given."""

    def operand(self, parameter: Tensor) -> Operand | None:
        """Of a parameter, what direct paths compute with; None of other tensors."""

    def given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a function, with these in place of parameters, in lists too."""

    def renew(self, parameter: Tensor) -> None:
        """A parameter itself was changed."""

    def copied(self, x: DTensor, copy: Tensor) -> None:
        """Another library gets a copy of a distributed tensor."""


class _Thread(threading.local):
    uses: Parameters | None = None  # Of the outermost call that is running.
    closed = 0  # The number of the script's own autograd functions that are running: these see DTensors only.
    chain: Any = None
    """The `distconv.model.direct.chains.call.Chain` of the outermost call that is running, if it computes in chains."""


running = _Thread()


def is_open() -> bool:
    """Whether a model that begins to run may take direct paths: nobody traces or transforms its functions."""
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__setitem__")


def is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE
