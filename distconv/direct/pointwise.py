"""Elementwise functions: they need no communication where all their tensors have one layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.direct.activation import Activation, activation
from distconv.direct.paths import path

UNARY = (
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign"),
    *("hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "abs", "neg"),
    *("square", "log", "log1p", "clamp"),
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
        changes = kwargs.get("inplace", False)
        if (changes and not x.is_fresh) or "out" in kwargs:
            return NotImplemented
        if args or len(kwargs) > 1:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor):
                    return NotImplemented
        y = function(x.local(), *args, **kwargs)
        return x if changes else activation(y, x._place)


for _function in dict.fromkeys(_named(UNARY, F, torch, Tensor)):
    _unary(_function)


def _binary(function: Callable[..., Any]) -> None:
    @path(function)
    def local(x: Any, other: Any, **kwargs: Any) -> Any:
        pair = _alike(x, other)
        if pair is None or "out" in kwargs:
            return NotImplemented
        return activation(function(*pair, **kwargs), x.place if type(x) is Activation else other.place)


def _alike(x: Any, other: Any) -> tuple[Any, Any] | None:
    """A rank's parts of two tensors with the same layout, or of a tensor and a number."""
    for one in (x, other):
        if type(one) is Activation:
            if one.share is not None or not one.place.is_plain:
                return None
        elif isinstance(one, Tensor) or not isinstance(one, int | float):
            return None
    if type(x) is Activation and type(other) is Activation:
        return (x.local(), other.local()) if x._place is other._place else None
    return (x.local(), other) if type(x) is Activation else (x, other.local())


for _function in dict.fromkeys((*_named(BINARY, torch, Tensor), *_named(REFLECTED, Tensor))):
    _binary(_function)


def _in_place(function: Callable[..., Any]) -> None:
    @path(function)
    def local(x: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is not Activation or not x.is_fresh or not x.place.is_plain or len(args) > 1:
            return NotImplemented
        pair = _alike(x, args[0]) if args else (x.local(),)
        if pair is None or any(isinstance(value, Tensor) for value in kwargs.values()):
            return NotImplemented
        function(*pair, **kwargs)
        return x


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
    return activation(torch.cat([x.local() for x in tensors], dim), place)
