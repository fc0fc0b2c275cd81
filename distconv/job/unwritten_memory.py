"""Zeros for a script that allocates memory without values, which would otherwise differ from rank to rank.

Tools that count the operators of a model run it on such tensors, and all ranks must have the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from distconv.private_names import SCRIPTED, UNWRITTEN, lacks
from distconv.tensors.user_lines import is_asked_by_program
from mucudnn.process.substitution import substituted
from mucudnn.process.warning import warn

_MAKERS = (torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")


@contextlib.contextmanager
def zeros_for_unwritten() -> Iterator[None]:
    """A context in which tensors without values are zeros if the program has asked for them."""
    if line := lacks(UNWRITTEN):
        warn(line, "distconv")
        yield
        return
    _device_constructors()  # torch keeps which functions `with torch.device(...)` concerns: the ones of now
    with contextlib.ExitStack() as undo:
        for owner, name in _MAKERS:
            real = getattr(owner, name)
            filled = _filled(real)
            operator = None if lacks(SCRIPTED) else torch.jit._builtins._find_builtin(real)
            if operator is not None:  # scripted functions know torch's functions as objects
                torch.jit._builtins._register_builtin(filled, operator)
            undo.enter_context(substituted(owner, **{name: filled}))
        yield


def _filled(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        result = make(*args, **kwargs)
        if torch.compiler.is_compiling():
            return result
        if is_asked_by_program():  # torch and distconv write to all that they ask for
            with torch.no_grad():
                result.zero_()
        return result

    return made
