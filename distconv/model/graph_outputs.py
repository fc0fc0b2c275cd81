"""Outputs of a compiled graph: where backward starts from some of them, the others get zeros in their layout.

Autograd makes plain zeros for an output that no loss depends on, and a graph on DTensors takes none.
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


class _Together(torch.autograd.Function):
    """Outputs of one graph, each as it is."""

    @staticmethod
    def forward(ctx: Any, *outputs: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.like = [(x._spec, x._local_tensor.shape, x.dtype, x.device) for x in outputs]
        made: Any = DTensor  # of the same local tensors, whose versions count what is written to them
        return tuple([made(x._local_tensor, x._spec, requires_grad=False) for x in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, ...]:
        return tuple([_zeros(*like) if x is None else x for x, like in zip(grads, ctx.like, strict=True)])


def _zeros(spec: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> DTensor:
    placements = [Replicate() if p.is_partial() else p for p in spec.placements]  # as tangents are
    return wrap(torch.zeros(shape, dtype=dtype, device=device), spec.mesh, placements, spec.shape)


def differentiable_apart(graph: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph whose outputs may be differentiated one without the others."""

    @functools.wraps(graph)
    def run(*args: Any) -> Any:
        outputs = graph(*args)
        return _together(outputs) if torch.is_grad_enabled() and isinstance(outputs, tuple | list) else outputs

    return run


def _together(outputs: Sequence[Any]) -> list[Any]:
    found = list(outputs)
    of_graphs: dict[Any, list[int]] = {}
    for at, x in enumerate(found):
        if type(x) is DTensor and x.grad_fn is not None:  # an output that is a view has a node of its own
            of_graphs.setdefault(x.grad_fn, []).append(at)
    for places in of_graphs.values():
        if len(places) > 1:
            for at, x in zip(places, apply(_Together, *(found[at] for at in places)), strict=True):
                found[at] = x
    return found
