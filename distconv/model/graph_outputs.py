"""Outputs of a compiled graph on DTensors: if backward starts from some of them, the others get zeros as DTensors.

Autograd itself makes plain zeros for an output that no loss depends on, which the graph's backward does not take. An
input that the graph changes in place counts as an output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from distconv.rules.operands.own_parts import apply
from distconv.tensors.dtensors import wrap


class _ZerosForMissing(torch.autograd.Function):
    """The identity on a graph's outputs. Its backward makes zeros where an output has no gradient."""

    @staticmethod
    def forward(ctx: Any, changed: int, *outputs: DTensor) -> tuple[Tensor, ...]:
        """``changed``: the number of inputs that the graph has changed; they are the last ones of the outputs."""
        ctx.set_materialize_grads(False)
        ctx.like = [(x._spec, x._local_tensor.shape, x.dtype, x.device) for x in outputs]
        made: Any = DTensor  # with the same local tensors, so that their versions count later changes
        count = len(outputs) - changed
        ctx.mark_dirty(*outputs[count:])
        return *[made(x._local_tensor, x._spec, requires_grad=False) for x in outputs[:count]], *outputs[count:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *[_zeros(*like) if x is None else x for x, like in zip(grads, ctx.like, strict=True)]


def _zeros(spec: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> DTensor:
    placements = [Replicate() if p.is_partial() else p for p in spec.placements]  # as tangents are
    return wrap(torch.zeros(shape, dtype=dtype, device=device), spec.mesh, placements, spec.shape)


def differentiable_apart(graph: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph of which backward may start from some outputs alone."""

    @functools.wraps(graph)
    def run(*args: Any) -> Any:
        inputs = [(x, x.grad_fn) for x in args if type(x) is DTensor]
        outputs = graph(*args)
        if not (torch.is_grad_enabled() and isinstance(outputs, tuple | list)):
            return outputs
        nodes = [(x, x.grad_fn) for x, before in inputs if x.grad_fn is not before]
        changed = [x for x, node in nodes if node is not None and "CopyBackwards" in node.name()]
        return _with_zeros_for_missing(outputs, changed)

    return run


def _with_zeros_for_missing(outputs: Sequence[Any], changed: Sequence[DTensor]) -> list[Any]:
    """Applies `_ZerosForMissing` to the outputs of each graph that has several, and to the inputs that it changed."""
    found = [*outputs, *changed]
    of_graphs: dict[Any, list[int]] = {}
    for at, x in enumerate(found):
        if at >= len(outputs):  # torch copies an output of the graph into it
            of_graphs.setdefault(x.grad_fn.next_functions[1][0], []).append(at)
        elif type(x) is DTensor and x.grad_fn is not None and not any(x is other for other in changed):
            of_graphs.setdefault(x.grad_fn, []).append(at)  # (an output that is a view has a node of its own)
    for places in of_graphs.values():
        if len(places) > 1:
            inputs = sum(at >= len(outputs) for at in places)
            for at, x in zip(places, apply(_ZerosForMissing, inputs, *(found[at] for at in places)), strict=True):
                found[at] = x
    return found[: len(outputs)]
