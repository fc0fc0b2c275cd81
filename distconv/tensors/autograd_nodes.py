"""Kinds of distconv's autograd functions, known by their classes: a program may give its own the same names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=type[torch.autograd.Function])


class NodeKind:
    """A set of autograd functions: a decorator adds a class to it, and it recognizes the nodes of its classes."""

    def __init__(self) -> None:
        self._nodes: set[type] = set()

    def __call__(self, function: F) -> F:
        self._nodes.add(function._backward_cls)
        return function

    def __contains__(self, node: Any) -> bool:
        """Whether a node of autograd's graph was recorded by one of the functions."""
        return type(node) in self._nodes


PARAMETER_USES = NodeKind()  # The functions that take a parameter's gradient.

PARAMETER_VIEWS = NodeKind()  # The functions that may come between a parameter and its use, besides torch's own views.

LAYOUT_CHANGES = NodeKind()
"""The functions that make a DTensor of the same values in another layout: no operators of the program."""

GIVEN_RESULTS = NodeKind()  # The functions that make the tensor that a script gets from a model's result.

RESULTS_OF_PARTS = NodeKind()  # The function whose results are those of a model's call in parts.


def nodes_of(ends: Iterable[Any]) -> set[Any]:
    """The nodes of autograd's graph from which some nodes were computed, and these; ``None`` stands for no node."""
    waiting = [*ends]
    found = {*waiting}
    while waiting:
        node = waiting.pop()
        for following, _ in () if node is None else node.next_functions:
            if following not in found:
                found.add(following)
                waiting.append(following)
    return found


def origin_node(x: Any) -> Any:
    """The node that has computed what a model's result was made of."""
    node = x.grad_fn
    while node in GIVEN_RESULTS:
        node = node.next_functions[0][0]
    return node
