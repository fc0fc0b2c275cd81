"""Lets methods that programs call in place of a model, such as the decode of an autoencoder, run in turn, too.

Such a method may call the modules of a model one after another, and keep a module's result for the next one, as
decoders of videos keep the last frames. Within one call in turn all of that stays with its part.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.replacements import replace
from distconv.turns.random_numbers import RandomNumbers
from mucudnn.process import print_line, substituted

NAME = "decode"  # Not encode, which may return an object of the program, in which tensors of parts would remain.


class Turning(NamedTuple):
    """How modules are called in turn."""

    is_asked: Callable[[nn.Module], bool]
    """Whether calls of a module are to run in turn, where their inputs can be cut."""
    call: Callable[[nn.Module, Any, Any], Any]  # The result of a call; NotImplemented where it does not run in turn.


_MARK = "_distconv_in_turn"

_refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Those whose method cannot run in turn as a whole: the modules that it calls run in turn one by one."""


def turn_methods(kind: type[nn.Module], turning: Turning) -> None:
    """Makes the method of a class run in turn from now on, for the modules that ``turning`` names."""
    for base in kind.__mro__:
        function = vars(base).get(NAME)
        if issubclass(base, nn.Module) and inspect.isfunction(function) and not hasattr(function, _MARK):
            replace(base, NAME, _turned(function, turning))


@contextlib.contextmanager
def methods_of_new_modules(turning: Turning) -> Iterator[None]:
    """A context in which `turn_methods` is called with the class of every module that is made."""
    init = nn.Module.__init__

    @functools.wraps(init)
    def making(module: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        turn_methods(type(module), turning)
        init(module, *args, **kwargs)

    with substituted(nn.Module, __init__=making):
        yield


def _turned(function: Callable[..., Any], turning: Turning) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if turning.is_asked(module) and module not in _refused:
            numbers = RandomNumbers(1, next((p.device.type for p in module.parameters()), "cpu"))
            before = _versions(module)
            try:
                with forward_replaced(module, functools.partial(function, module)):
                    result = turning.call(module, args, kwargs)
                if result is not NotImplemented:
                    return result
            except UnsupportedOperation as error:
                if _versions(module) != before:
                    raise  # a second call would change the module once more
                numbers.hand_over()
                _refused.add(module)
                what = f"{type(module).__name__}.{NAME}"
                print_line(f"distconv: in turn: the modules of {what} run one by one: {error}")
        return function(module, *args, **kwargs)

    setattr(method, _MARK, True)
    return method


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """The version of each tensor, as far as torch counts changes."""
    return [x._version for x in tensors if not x.is_inference()]


def _versions(module: nn.Module) -> list[int]:
    return versions(itertools.chain(module.parameters(), module.buffers()))


@contextlib.contextmanager
def forward_replaced(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which a call of the module calls the function."""
    attributes = module.__dict__
    before = attributes.get("forward")
    attributes["forward"] = function
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before
