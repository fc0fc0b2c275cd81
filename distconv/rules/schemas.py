"""What the schema of one of torch's operators says: its name, its arguments, and which tensors it changes or views."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def name_of(func: Any) -> str:
    """The name without its namespace, such as ``max_pool2d``; that of an overload is not part of it."""
    return str(func._schema.name).partition("::")[2]


def full_name(func: Any) -> str:
    """The name with that of the overload, such as ``div.Tensor_mode``."""
    overload = func._schema.overload_name
    return f"{name_of(func)}.{overload}" if overload else name_of(func)


def operator(name: str) -> Any:
    """The operator of such a full name; None where this torch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def named_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name, defaults included."""
    names, defaults = _arguments(func)
    return defaults | dict(zip(names, args, strict=False)) | kwargs


@functools.lru_cache(maxsize=4096)
def _arguments(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of all arguments, and the defaults of those that have one."""
    arguments = func._schema.arguments
    return tuple(a.name for a in arguments), {a.name: a.default_value for a in arguments if a.has_default_value()}


def changed_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among an operator's arguments that it changes."""
    found = [
        args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    every = (x for value in found for x in (value if isinstance(value, list | tuple) else (value,)))
    return [x for x in every if isinstance(x, Tensor)]


def is_tensor(kind: Any) -> bool:
    """Whether a schema's type is that of a tensor, an optional one, or a list of them."""
    if isinstance(kind, torch.ListType | torch.OptionalType):
        return is_tensor(kind.getElementType())
    return isinstance(kind, torch.TensorType)


@functools.lru_cache(maxsize=4096)
def is_view(func: Any) -> bool:
    """Whether its result is a view of an argument."""
    return any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
