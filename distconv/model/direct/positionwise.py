"""Functions whose results have the positions of space of their operands: computed with what a rank has of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.paths import running
from distconv.model.direct.where import Where


def computed(function: Callable[..., Tensor], operands: Sequence[Activation], place: Where) -> Activation:
    """What a function makes of a rank's parts of the operands: its own ones, or within a chain all that it has."""
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
        x.forget_wide()  # which would stay as it was
        function(x.local(), *(other.local() for other in others))
        return x
    tensors, coverage, number = entered
    function(*tensors)
    return chain.changed(x, tensors[0], coverage, number)
