"""Small tensors, which an operator may read whole on every rank where it cannot be computed in parts.

A matrix to invert, a table of relative positions or the scores of some classes are needed whole, and to gather them
costs next to nothing. An activation is not small: for it the operator stays refused. What is small is decided by shapes
alone, so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_leaves, tree_map

from distconv.dtensors import wrap
from distconv.layouts import find_layout, layout, replicated, undoes_shard
from distconv.refusal import UnsupportedOperation, refuse
from distconv.rules.copies import copy_of
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import moved

MOST_BYTES = 1 << 20
"""The most that all sharded tensors of one operator may take together to be gathered."""

gathers: list[Callable[[Any], None]] = []
"""Each is called with an operator before small tensors are gathered for it."""


def permit(func: Any, values: Any, why: str | UnsupportedOperation) -> None:
    """The sharded tensors among some values are about to be gathered for an operator, if they are small.

    UnsupportedOperation where they are not: the one given, or one that says why they would have to be gathered.
    """
    sharded = [t for t in tree_leaves(values) if isinstance(t, DTensor) and undone(t)]
    if sum(t.numel() * t.element_size() for t in sharded) > MOST_BYTES:
        if isinstance(why, UnsupportedOperation):
            raise why
        raise refuse(func, f"of a tensor {tuple(sharded[0].shape)} laid out as {sharded[0].placements} {why}")
    if sharded:
        for tell in gathers:
            tell(func)


def undone(x: DTensor) -> bool:
    """Whether a tensor has shards, which a gather would undo."""
    return undoes_shard(x.device_mesh, x.placements, replicated(x.device_mesh))


NO_RULE = "it has no rule for shards; use distconv.gather first where that is meant"


def small_or_refused(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], why: str | UnsupportedOperation = NO_RULE
) -> Any:
    """What an operator gives for whole tensors where these are small; else it is refused."""
    permit(func, (args, kwargs), why)
    return _computed_whole(func, args, kwargs)


def _computed_whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator gives for whole tensors, every rank computing all of it; laid out as its first sharded tensor
    where the shapes are equal, else whole on every rank.
    """
    is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
    mesh, _ = find_layout(*tree_leaves((args, kwargs)))

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        local = moved(value, mesh, replicated(mesh))._local_tensor
        return local.clone() if local is value._local_tensor else local

    written = _written(func, args, kwargs)
    whole_args, whole_kwargs = tree_map(whole, (list(args), dict(kwargs)))
    result = func(*whole_args, **whole_kwargs)
    if written:
        for tensor, changed in zip(written, _written(func, whole_args, whole_kwargs), strict=True):
            tensor._local_tensor.copy_(local_as(changed, mesh, tensor.placements))
        return written[0] if len(written) == 1 else tuple(written)
    first = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, DTensor))

    def write(x: DTensor, view: DTensor) -> None:
        own = whole(x)
        func(own, *args[1:], **kwargs).copy_(whole(view))
        x._local_tensor.copy_(local_as(own, mesh, x.placements))

    def shard(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        y = _laid_as(value, mesh, layout(first)[1] if value.shape == first.shape else replicated(mesh))
        if not is_view:
            return y
        return copy_of(y, first, write if isinstance(result, Tensor) else None)

    return tree_map(shard, result)


def _laid_as(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    placements = replicated(mesh) if any(p.is_partial() for p in placements) else tuple(placements)
    return wrap(local_as(value, mesh, placements).clone(), mesh, placements, value.shape)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operator changes."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
