"""Kinds of distconv's autograd functions, told by their classes: a program may give its own the same names."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=type[torch.autograd.Function])


class Kind:
    """Some classes of autograd functions. It is the decorator that adds a class, and tells nodes of those classes."""

    def __init__(self) -> None:
        self._nodes: set[type] = set()

    def __call__(self, function: F) -> F:
        self._nodes.add(function._backward_cls)
        return function

    def __contains__(self, node: Any) -> bool:
        """Whether a node of autograd's graph was recorded by one of the functions."""
        return type(node) in self._nodes


PARAMETER_USES = Kind()
"""What takes a parameter's gradient."""

PARAMETER_VIEWS = Kind()
"""What may lie between a parameter and its use, besides torch's own views."""

LAYOUT_CHANGES = Kind()
"""What makes a DTensor of the same values: no operator of the program."""

GIVEN_RESULTS = Kind()
"""What makes of a model's result the tensor that a script is given."""
