"""Graphs made with a parameter before another tensor took its place: the parameter gets their gradients, too.

A penalty that a script computes before it first calls the model is such a graph. Its gradients arrive at the tensor
of before (``earlier`` here), those of later graphs at the parameter. In one process both arrive at one node of
autograd, which adds them up and then calls the hooks. So where a backward reaches both, it runs without the
parameter's hooks, which are called with the sum at its end; and where a program asks for the gradient of the
parameter, it gets that of the earlier tensor with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from distconv.model.parameter_hooks import HOOKS, is_of_several, wait_for
from distconv.model.shard_gather import cut, sharded_like
from distconv.private_names import RESHAPED, require
from distconv.tensors.autograd_nodes import nodes_of
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.replacements import in_place_of, replace, until_put_back

_pairs: list[tuple[TensorWeakRef, DTensor]] = []
"""Each earlier tensor, which lives as long as a graph with it, and the parameter that has taken its place."""


def pass_gradients(earlier: Tensor, now: DTensor) -> None:
    """From now on, gradients that arrive at ``earlier`` are added to those of ``now``, whose hooks they reach."""
    if not (earlier.is_leaf and earlier.requires_grad):
        return

    def add(earlier: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a replaced parameter would pass this on
            grad, earlier.grad = earlier.grad, None
        if grad is None:
            return
        grad = _sharded_gradient(grad, now)
        now.grad = grad if now.grad is None else now.grad + grad

    wait_for(now, earlier)
    for name in HOOKS:  # they are called with the whole gradient of the parameter
        setattr(earlier, name, None)
    earlier.register_post_accumulate_grad_hook(add)
    _watch_backward()
    _pairs.append((TensorWeakRef(earlier), now))


def _sharded_gradient(grad: Tensor, now: DTensor) -> DTensor:
    if grad.requires_grad:
        return cut(grad, now.device_mesh, now.placements).to(now.dtype)  # type: ignore[return-value]
    return sharded_like(now, grad).to(now.dtype)  # type: ignore[return-value]


@until_put_back
def _watch_backward() -> None:
    require(RESHAPED)
    stock = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    replace(torch.autograd, "_engine_run_backward", in_place_of(stock, _run_backward))


def _run_backward(stock: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    inputs = args[3]
    reached = _reached(outputs, inputs) if _pairs else []
    if not reached:
        return stock(outputs, *args, **kwargs)
    if inputs:
        args = *args[:3], (*inputs, *(earlier for earlier, _ in reached)), *args[4:]
    parameters = list({id(now): now for _, now in reached}.values())
    if kwargs["accumulate_grad"]:
        with _hooks_at_the_end(parameters, create_graph=args[2]):
            return stock(outputs, *args, **kwargs)
    with _without_hooks(parameters):
        found = stock(outputs, *args[:4], True, *args[5:], **kwargs)
    return _added(inputs, found, reached, allow_unused=args[4], create_graph=args[2])


def _reached(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[Tensor, DTensor]]:
    """The earlier tensors that a backward reaches, and their parameters; those alone that need more than `add`."""
    alive = [(earlier, now) for ref, now in _pairs if (earlier := ref()) is not None]
    _pairs[:] = [pair for pair in _pairs if pair[0]() is not None]
    if inputs:
        wanted = [pair for pair in alive if any(_is_at(x, pair[1]) for x in inputs)]
    else:
        wanted = [pair for pair in alive if any(getattr(pair[1], name) for name in HOOKS)]
    if not wanted:
        return []
    with torch._C.DisableTorchFunctionSubclass():
        nodes = nodes_of((x if isinstance(x, GradientEdge) else get_gradient_edge(x)).node for x in outputs)
        return [pair for pair in wanted if get_gradient_edge(pair[0]).node in nodes]


def _is_at(x: Tensor | GradientEdge, parameter: DTensor) -> bool:
    return x is parameter or (isinstance(x, GradientEdge) and x.node is get_gradient_edge(parameter).node)


@contextlib.contextmanager
def _without_hooks(parameters: Sequence[DTensor]) -> Iterator[None]:
    kept = [
        (parameter, name, own)
        for parameter in parameters
        for name in HOOKS
        if (own := getattr(parameter, name)) is not None
    ]
    for parameter, name, own in kept:
        setattr(parameter, name, type(own)())  # None would leave hooks behind accumulation in place
    try:
        yield
    finally:
        for parameter, name, own in kept:
            own.update(getattr(parameter, name))  # those that were registered meanwhile
            setattr(parameter, name, own)


@contextlib.contextmanager
def _hooks_at_the_end(parameters: Sequence[DTensor], create_graph: bool) -> Iterator[None]:
    """A context for a backward, at whose end the parameters' hooks are called with the sums that have arrived."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    arrived: list[Any] = []
    try:
        with _without_hooks(parameters):
            yield
        arrived = [parameter.grad for parameter in parameters]
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
    for parameter, grad, own in zip(parameters, arrived, before, strict=True):
        if grad is not None:
            with torch.set_grad_enabled(create_graph):
                grad = _hooked(parameter, grad)
                if own is None:
                    parameter.grad = grad.clone()  # a hook may have kept the other
                elif create_graph:
                    parameter.grad = own + grad
                else:
                    own.add_(grad)
                for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                    hook(parameter)


def _hooked(parameter: DTensor, grad: Tensor) -> Tensor:
    """A gradient as the parameter's hooks make it."""
    for hook in list((parameter._backward_hooks or {}).values()):
        if is_of_several(hook):
            raise UnsupportedOperation(
                f"register_multi_grad_hook: a parameter {tuple(parameter.shape)} in a backward of a graph from before"
                " the parameter was split; accepted: that graph, as of a penalty, made after the first call"
            )
        changed = hook(grad)
        if changed is not None:
            grad = changed if isinstance(changed, DTensor) else sharded_like(parameter, changed)
    return grad


def _added(
    inputs: Sequence[Any],
    found: Sequence[Tensor | None],
    reached: Sequence[tuple[Tensor, DTensor]],
    allow_unused: bool,
    create_graph: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of inputs, with those of the earlier tensors, which follow them in ``found``."""
    grads, more = list(found[: len(inputs)]), found[len(inputs) :]
    totals: dict[int, Tensor] = {}  # By parameter, which may be asked for twice.
    for index, x in enumerate(inputs):
        total = grads[index]
        own = [(grad, now) for grad, (_, now) in zip(more, reached, strict=True) if _is_at(x, now)]
        with torch.set_grad_enabled(create_graph):
            for grad, now in own:
                if grad is not None and id(now) not in totals:
                    total = _sharded_gradient(grad, now) if total is None else total + _sharded_gradient(grad, now)
            if own and total is not None:
                now = own[0][1]
                if id(now) not in totals:
                    totals[id(now)] = _hooked(now, total)
                total = totals[id(now)]
        if total is None and not allow_unused:
            raise RuntimeError(
                f"The differentiated Tensor at index {index} appears to not have been used in the graph. Set"
                " allow_unused=True if this is the desired behavior."
            )
        grads[index] = total
    return tuple(grads)
