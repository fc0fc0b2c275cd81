"""Which functions have a direct path, and when they may take it; and which layers take theirs at once.

The `forward` of a layer, and torch's search for what an activation does in the function that this calls, take as long
as a small layer itself. They are left out where nothing but torch's own code would run there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distconv.private_names import LAYERS, lacks

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


class Layer(NamedTuple):
    """What a call of one of torch's layers passes, all of which must be torch's own."""

    compute: Callable[[Any, Any, Any], Any]  # From the path, the layer and its input, an activation, to the result.
    forward: Any
    name: str  # Of another method of the class,
    method: Any  # which is this one,
    function: str  # and of the function of `torch.nn.functional` that they call,
    real: Any  # which is this one.


layers: dict[type[nn.Module], Layer] = {}
"""By class: layers whose results may be computed at once. The result is NotImplemented where they are to be called."""


def layer(name: str, method: str, *kinds: type[nn.Module]) -> Callable[[H], H]:
    """Registers the decorated function, as `Layer.compute`, for classes of layers that call the function ``name``."""

    def register(compute: H) -> H:
        for kind in () if lacks(LAYERS) else kinds:
            layers[kind] = Layer(compute, kind.forward, method, getattr(kind, method), name, getattr(F, name))
        return compute

    return register


class _Thread(threading.local):
    uses: Any = None
    """The `distconv.model.uses.Uses` of the outermost call that is running: the tensors that represent parameters."""
    closed = 0  # The number of the script's own autograd functions that are running, which are given DTensors only.
    chain: Any = None
    """The `distconv.model.direct.chains.call.Chain` of the outermost call that is running, if it computes in chains."""
    again = False  # Whether the functions that run now are those of a checkpoint, which computes them again.


running = _Thread()


@contextlib.contextmanager
def temporarily(owner: Any, /, **values: object) -> Iterator[None]:
    """A context in which an object of this thread alone has other attributes."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


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
