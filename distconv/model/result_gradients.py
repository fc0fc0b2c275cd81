"""Gradients with respect to the results of a model, where other results of the same call depend on them.

A script may be given a result as another tensor than the model goes on with: gathered, or as a DTensor of what this
rank has. In one process both are one tensor. So the gradient is taken where the model has made the result, through
which all that depends on it goes, and is then given as the result is: plain, or as a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from distconv.model.direct.border import FromRoot
from distconv.model.shard_gather import gather
from distconv.rules.operands.own_parts import apply
from distconv.tensors.autograd_nodes import GIVEN_RESULTS


def made(x: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Where a model has made an input of `torch.autograd.grad`, and what makes of the gradient there that of the input.

    What is no result of a model is returned as it is.
    """
    edge = x
    place = None
    while isinstance(edge, Tensor | GradientEdge):
        node: Any = edge.grad_fn if isinstance(edge, Tensor) else edge.node
        if node not in GIVEN_RESULTS:
            break
        place = getattr(node, "where", None)
        edge = GradientEdge(*node.next_functions[0])

    def given(grad: Tensor) -> Tensor:
        grad = apply(FromRoot, grad, place) if place is not None and not isinstance(grad, DTensor) else grad
        return grad if isinstance(x, DTensor) else gather(grad)

    return edge, (lambda grad: grad) if edge is x else given
