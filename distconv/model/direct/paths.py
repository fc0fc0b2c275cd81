"""Which functions have a direct path, and when they may take it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.rules.operands.own_parts import Taker

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


class Operand(Protocol):
    """Represents a parameter in direct paths; a parameter's activation is one.

    Attributes:
        tensor: this rank's plain tensor.
        root: one for functions whose gradient autograd adds up.
        place: the layout.
        given: its DTensor or activation, once a function has asked for it.
        changed: whether its DTensor has been changed in place, so that the root is out of date.
    """

    @property
    def tensor(self) -> Tensor: ...
    @property
    def root(self) -> Tensor: ...
    @property
    def place(self) -> ShapedLayout: ...

    given: Tensor | None

    @property
    def changed(self) -> bool: ...

    def handed(self) -> tuple[Tensor, Taker | None]:
        """The root for a function that takes its gradient itself, and what it gives that to, unless None."""


class Parameters(Protocol):
    """Gives the tensors that represent parameters of a running model in functions. See `distconv.model.uses.Uses`.

    given_out: the ids of tensors whose `data` the model has read, and may have changed without a new version.
    """

    given_out: set[int]

    def __call__(self, parameter: Tensor) -> Tensor:
        """The activation or DTensor of a parameter."""

    def operand(self, parameter: Tensor) -> Operand | None:
        """The operand of a parameter for direct paths; None for other tensors."""

    def given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a function, with activations or DTensors in place of parameters, in lists too."""

    def renew(self, parameter: Tensor) -> None:
        """Called when a parameter itself was changed."""

    def copied(self, x: DTensor, copy: Tensor) -> None:
        """Called when another library gets a copy of a distributed tensor."""


class _Thread(threading.local):
    uses: Parameters | None = None  # The parameters of the outermost call that is running.
    closed = 0  # The number of the script's own autograd functions that are running, which are given DTensors only.
    chain: Any = None
    """The `distconv.model.direct.chains.call.Chain` of the outermost call that is running, if it computes in chains."""
    again = False  # Whether the functions that run now are those of a checkpoint, which computes them again.


running = _Thread()


def is_open() -> bool:
    """Whether a model that begins to run may take direct paths: its functions are neither traced nor transformed."""
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__setitem__")


def is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE
