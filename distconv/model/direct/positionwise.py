"""Calls functions whose result at a position of space depends on the same position of the operands alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.paths import running
from distconv.model.direct.shaped_layout import ShapedLayout


def computed(function: Callable[..., Tensor], operands: Sequence[Activation], place: ShapedLayout) -> Activation:
    """The result of a function of this rank's parts of operands; within a chain of the positions beside them too."""
    chain = running.chain
    entered = None if chain is None else chain.enter(operands, place, fetches=len(operands) > 1)
    if entered is None:
        return activation(function(*[x.local() for x in operands]), place)
    tensors, coverage, number = entered
    return chain.leave(function(*tensors), place, coverage, number)


def changed(function: Callable[..., Any], x: Activation, *others: Activation) -> Activation:
    """The first operand, once a function has changed it in place."""
    chain = running.chain
    entered = None if chain is None else chain.enter((x, *others), x.place, fetches=bool(others))
    if entered is None:
        x.forget_wide()  # the function does not change it
        function(x.local(), *(other.local() for other in others))
        return x
    tensors, coverage, number = entered
    function(*tensors)
    return chain.changed(x, tensors[0], coverage, number)
