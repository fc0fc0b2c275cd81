"""The hooks that a script registers on parameters, called as in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _Arrival:
    """A parameter's hook that notes whether there is a gradient, before that is accumulated."""

    __torch_unserializable__ = True  # so that torch does not warn where the parameter is saved
    is_missing = False

    def __call__(self, grad: Tensor | None) -> None:
        self.is_missing = grad is None


def _with_gradient(hook: Callable[[Tensor], Any], grad: Tensor | None) -> Any:
    return None if grad is None else hook(grad)


def _behind(arrival: _Arrival, hook: Callable[[Tensor], Any], parameter: Tensor) -> Any:
    return None if arrival.is_missing else hook(parameter)


def _calls(hook: Any, function: Callable[..., Any]) -> bool:
    return isinstance(hook, functools.partial) and hook.func is function


def not_without_gradient(parameters: Iterable[Tensor]) -> None:
    """From now on, hooks of these parameters are called only where there is a gradient.

    Parameters share a node of autograd (`distconv.model.gradients`), behind which it reaches those without a gradient,
    too. It would call their hooks with None.
    """
    with torch._C.DisableTorchFunctionSubclass():  # the class of a parameter in use has other attributes
        for parameter in parameters:
            hooks: Any = parameter._backward_hooks or {}
            for key, hook in hooks.items():
                is_ours = isinstance(hook, _Arrival) or _calls(hook, _with_gradient)
                if not is_ours and _nodes(hook) is None:
                    hooks[key] = functools.partial(_with_gradient, hook)
            behind: Any = parameter._post_accumulate_grad_hooks or {}
            new = {key: hook for key, hook in behind.items() if not _calls(hook, _behind)}
            if new:
                arrival = _Arrival()
                parameter.register_hook(arrival)
                behind.update((key, functools.partial(_behind, arrival, hook)) for key, hook in new.items())


def is_of_several(hook: Any) -> bool:
    """Whether `register_multi_grad_hook` has made a hook, which can be called within backward alone."""
    return getattr(getattr(hook, "__code__", None), "co_filename", None) == graph.__file__


def _nodes(hook: Any) -> list[Any] | None:
    """The nodes that a hook of several tensors waits for; None for one that waits for none."""
    names = hook.__code__.co_freevars if is_of_several(hook) else ()
    if "grad_fns" not in names:
        return None
    found: list[Any] = hook.__closure__[names.index("grad_fns")].cell_contents
    return found


def wait_for(now: Tensor, earlier: Tensor) -> None:
    """Has the hooks of several tensors wait for a parameter's gradient in place of an earlier tensor's."""
    with torch._C.DisableTorchFunctionSubclass():
        for hook in (now._backward_hooks or {}).values():
            nodes = _nodes(hook)
            if nodes:
                before, after = graph.get_gradient_edge(earlier).node, graph.get_gradient_edge(now).node
                nodes[:] = [after if node is before else node for node in nodes]
