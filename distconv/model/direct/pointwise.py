"""Elementwise functions: they need no communication where all their tensors have one layout.

A function whose result at a position of space depends on the same position of the operands alone may go on in a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.paths import is_in_place, layer, path, paths, running
from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.tensors.layouts import dim_axes

NAMES = (
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign"),
    *("hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "abs", "neg"),
    *("square", "log", "log1p", "clamp", "clone"),
    *("add", "sub", "mul", "div", "true_divide", "__add__", "__sub__", "__mul__", "__truediv__"),
    *("__radd__", "__rmul__", "__rsub__"),
    *("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "relu_"),
)
"""Of functions of torch and `torch.nn.functional`, and of methods; some change their first operand in place."""

_PLAIN = float, int, str, torch.memory_format, type(None)
"""The allowed types of arguments that are no activations."""


def _pointwise(function: Callable[..., Any]) -> None:
    in_place = is_in_place(function.__name__)

    @path(function)
    def local(*args: Any, **kwargs: Any) -> Any:
        operands: list[Activation] = []
        changes = in_place or kwargs.get("inplace", False)
        for value in args:
            if type(value) is Activation:
                operands.append(value)
                if value.share is not None or not value.place.is_plain or value._place is not operands[0]._place:
                    return NotImplemented
            elif value is True:  # the argument `inplace` of an activation function such as relu
                changes = True
            elif not isinstance(value, _PLAIN):
                return NotImplemented
        if kwargs and not all(isinstance(value, _PLAIN) for value in kwargs.values()):
            return NotImplemented
        if not operands or (changes and not (operands[0] is args[0] and operands[0].is_fresh)):
            return NotImplemented

        made = function
        if kwargs or len(operands) < len(args):

            def made(*own: Tensor) -> Any:
                parts = iter(own)
                return function(*[next(parts) if type(value) is Activation else value for value in args], **kwargs)

        return changed(made, *operands) if changes else computed(made, operands, operands[0]._place)


for _function in dict.fromkeys(
    getattr(home, name) for name in NAMES for home in (F, torch, Tensor) if hasattr(home, name)
):
    _pointwise(_function)


@layer("relu", "extra_repr", nn.ReLU)
def _rectified(_: Any, module: Any, x: Activation) -> Any:
    if not module.inplace:
        return paths[torch.relu](x)
    return changed(torch.relu_, x) if x.is_fresh and x.place.is_plain else NotImplemented


@path(F.dropout)
def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """In evaluation the input itself."""
    return input if type(input) is Activation and not training and 0 <= p <= 1 else NotImplemented


@path(torch.cat)
def cat(tensors: Any, dim: int = 0, **options: Any) -> Any:
    """Along a dim that is not sharded."""
    if options or not isinstance(tensors, list | tuple) or not all(type(x) is Activation for x in tensors):
        return NotImplemented
    first = tensors[0].place
    dim = dim % len(first.shape)
    if any(
        x.share is not None or x.place.placements != first.placements or x._place.mesh != first.mesh for x in tensors
    ):
        return NotImplemented
    shapes = [tuple(x._place.shape) for x in tensors]
    around = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    is_sharded = bool(dim_axes(first.mesh, first.placements, dim))
    if not first.is_plain or is_sharded or len(around) > 1 or len({len(shape) for shape in shapes}) > 1:
        return NotImplemented
    total = sum(shape[dim] for shape in shapes)
    place = first.of_shape((*shapes[0][:dim], total, *shapes[0][dim + 1 :]))
    return computed(lambda *own: torch.cat(own, dim), tensors, place)


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
    return chain.leave(tensors[0], x.place, coverage, number, changed=x)
