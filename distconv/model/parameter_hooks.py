"""The hooks that a script registers on parameters, called as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _OfGradients:
    """A hook that is called only where there is a gradient."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, grad: Tensor | None) -> Any:
        return None if grad is None else self._hook(grad)


def not_without_gradient(parameters: Iterable[Tensor]) -> None:
    """From now on, hooks of these parameters are called only where there is a gradient.

    Parameters share a node of autograd (`distconv.model.gradients`), behind which it reaches those without a gradient,
    too. It would call their hooks with None.
    """
    with torch._C.DisableTorchFunctionSubclass():  # the class of a parameter in use has other attributes
        for parameter in parameters:
            hooks: Any = parameter._backward_hooks or {}
            for key, hook in hooks.items():
                if not isinstance(hook, _OfGradients) and _nodes(hook) is None:
                    hooks[key] = _OfGradients(hook)


def _nodes(hook: Any) -> list[Any] | None:
    """The nodes that a hook of several tensors waits for (`register_multi_grad_hook`); None for other hooks."""
    names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
    if getattr(hook, "__module__", None) != "torch.autograd.graph" or "grad_fns" not in names:
        return None
    found: list[Any] = hook.__closure__[names.index("grad_fns")].cell_contents
    return found


def wait_for(now: Tensor, earlier: Tensor) -> None:
    """Has the hooks of several tensors wait for a parameter's gradient in place of an earlier tensor's."""
    with torch._C.DisableTorchFunctionSubclass():
        for hook in (now._backward_hooks or {}).values():
            nodes = _nodes(hook)
            if nodes:
                before, after = get_gradient_edge(earlier).node, get_gradient_edge(now).node
                nodes[:] = [after if node is before else node for node in nodes]
