"""Hooks of `Module.register_backward_hook`, which torch hangs on the node of autograd that made a module's result.

A rank's node is another one, with other inputs, or none of the graph that backward walks through. So these hooks are
called with the gradients of the module's results, as full hooks are, and cannot ask for those of the node's inputs.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any, NoReturn

from torch import Tensor, nn

from distconv.private_names import OLD_HOOKS, lacks
from distconv.tensors.refusal import UnsupportedOperation

_call_uncompiled = nn.Module._call_impl


def call_uncompiled(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The result of a module's call within a model, whose gradient is given to the module's hooks of the old kind."""
    if not module._backward_hooks or lacks(OLD_HOOKS) or module._is_full_backward_hook is not False:
        return _call_uncompiled(module, *args, **kwargs)
    hooks = module._backward_hooks
    module._backward_hooks = OrderedDict()
    try:
        result = _call_uncompiled(module, *args, **kwargs)
    finally:
        module._backward_hooks = hooks
    first = result
    while not isinstance(first, Tensor):
        first = next(x for x in first.values() if isinstance(x, Tensor)) if isinstance(first, dict) else first[0]
    if first.requires_grad:
        for hook in hooks.values():
            first.register_hook(functools.partial(_given, hook, module))
    return result


def _given(hook: Any, module: nn.Module, grad: Tensor) -> None:
    if hook(module, _OfInputs(), (grad,)) is not None:
        _refuse(module, "return gradients")


class _OfInputs(tuple[Any, ...]):
    """The gradients of a node's inputs, which a rank does not have."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse(None, "ask for gradients of inputs")

    def __iter__(self) -> NoReturn:
        _refuse(None, "ask for gradients of inputs")

    def __len__(self) -> NoReturn:
        _refuse(None, "ask for gradients of inputs")


def _refuse(module: nn.Module | None, what: str) -> NoReturn:
    of = "" if module is None else f" of {type(module).__name__}"
    raise UnsupportedOperation(
        f"hooks of register_backward_hook{of} that {what}, which are those of one process's node of autograd; accepted:"
        " register_full_backward_hook"
    )
