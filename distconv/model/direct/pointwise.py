"""Elementwise functions: they need no communication where all their tensors have one layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.model.direct.activation import Activation
from distconv.model.direct.paths import path
from distconv.model.direct.positionwise import changed, computed

UNARY = (
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign"),
    *("hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "abs", "neg"),
    *("square", "log", "log1p", "clamp", "clone"),
)
BINARY = ("add", "sub", "mul", "div", "true_divide", "__add__", "__sub__", "__mul__", "__truediv__")
REFLECTED = ("__radd__", "__rmul__", "__rsub__")
IN_PLACE = ("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__")


def _named(names: tuple[str, ...], *homes: Any) -> list[Callable[..., Any]]:
    return [getattr(home, name) for name in names for home in homes if hasattr(home, name)]


def _unary(function: Callable[..., Any]) -> None:
    @path(function)
    def local(x: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is not Activation or x.share is not None or not x.place.is_plain:
            return NotImplemented
        changes = kwargs.get("inplace", False) or any(value is True for value in args)
        if (changes and not x.is_fresh) or "out" in kwargs:
            return NotImplemented
        if args or len(kwargs) > 1:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor):
                    return NotImplemented

        def of_part(own: Tensor) -> Any:
            return function(own, *args, **kwargs)

        return changed(of_part, x) if changes else computed(of_part, (x,), x._place)


for _function in dict.fromkeys(_named(UNARY, F, torch, Tensor)):
    _unary(_function)


@path(F.dropout)
def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Itself in evaluation."""
    return input if type(input) is Activation and not training and 0 <= p <= 1 else NotImplemented


def _binary(function: Callable[..., Any]) -> None:
    @path(function)
    def local(x: Any, other: Any, **kwargs: Any) -> Any:
        if not _are_alike(x, other) or "out" in kwargs:
            return NotImplemented
        if type(other) is not Activation:
            return computed(lambda own: function(own, other, **kwargs), (x,), x.place)
        if type(x) is not Activation:
            return computed(lambda own: function(x, own, **kwargs), (other,), other.place)
        return computed(lambda *own: function(*own, **kwargs), (x, other), x.place)


def _are_alike(x: Any, other: Any) -> bool:
    """Whether they are two tensors with the same layout, or a tensor and a number."""
    for one in (x, other):
        if type(one) is Activation:
            if one.share is not None or not one.place.is_plain:
                return False
        elif isinstance(one, Tensor) or not isinstance(one, int | float):
            return False
    return type(x) is not Activation or type(other) is not Activation or x._place is other._place


for _function in dict.fromkeys((*_named(BINARY, torch, Tensor), *_named(REFLECTED, Tensor))):
    _binary(_function)


def _in_place(function: Callable[..., Any]) -> None:
    @path(function)
    def local(x: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is not Activation or not x.is_fresh or not x.place.is_plain or len(args) > 1:
            return NotImplemented
        if any(isinstance(value, Tensor) for value in kwargs.values()) or not (not args or _are_alike(x, args[0])):
            return NotImplemented
        others = [one for one in args if type(one) is Activation]
        numbers = () if others else args
        return changed(lambda *own: function(*own, *numbers, **kwargs), x, *others)


for _function in dict.fromkeys((*_named(IN_PLACE, Tensor), torch.relu_, Tensor.relu_)):
    _in_place(_function)


@path(torch.cat)
def cat(tensors: Any, dim: int = 0, **options: Any) -> Any:
    """Along a dim of which each rank has all."""
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
    if not first.is_plain or first.shards(dim) or len(around) > 1 or len({len(shape) for shape in shapes}) > 1:
        return NotImplemented
    total = sum(shape[dim] for shape in shapes)
    place = first.of_shape((*shapes[0][:dim], total, *shapes[0][dim + 1 :]))
    return computed(lambda *own: torch.cat(own, dim), tensors, place)
