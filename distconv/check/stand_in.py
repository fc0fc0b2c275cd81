"""Stand-ins for results that no rule computes, so that a check continues after a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import local_shape
from distconv.tensors.mesh import is_ours


def stand_in(func: Any, args: Sequence[Any], kwargs: dict[str, Any], of: DTensor) -> Any:
    """Zeros of the shapes that the operator's results have in one process, laid out as ``of`` is where they can be.

    Raises what the operator raises in one process: then it is no matter of ranks.
    """
    with unset_fake_temporarily(), torch.no_grad():
        results = func(*tree_map_only(Tensor, _shape_of, args), **tree_map_only(Tensor, _shape_of, kwargs))
    if func._schema.is_mutable and args and isinstance(args[0], Tensor):
        return args[0]
    if not isinstance(results, Tensor | list | tuple):
        raise TypeError(f"{func}: its result depends on the numbers of a tensor")
    return tree_map_only(Tensor, lambda result: _zeros(result, of), results)


def recorded(result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A stand-in above autograd: a step's backward goes on through it to the inputs, whose gradients are zeros."""
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    return tree_map_only(Tensor, lambda own: _Recorded.apply(own, *inputs), result) if inputs else result


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return own

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        return None, *map(torch.zeros_like, ctx.saved_tensors)


def _shape_of(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _zeros(like: Tensor, of: DTensor) -> DTensor:
    mesh, local = of.device_mesh, of._local_tensor
    placements = nearest(mesh, of.placements, of.shape, like.shape)
    zeros = torch.zeros(local_shape(mesh, placements, like.shape), dtype=like.dtype, device=local.device)
    return wrap(zeros, mesh, placements, like.shape)


def nearest(
    mesh: DeviceMesh, placements: Sequence[Placement], before: Sequence[int], after: Sequence[int]
) -> tuple[Placement, ...]:
    """The layout of a result: sharded by the same dims where it has them in the same extent, else whole."""
    return tuple(
        placement
        if isinstance(placement, Shard)
        and placement.dim < min(len(before), len(after))
        and before[placement.dim] == after[placement.dim]
        else Replicate()
        for placement in placements
    )


def first_of_ours(values: Sequence[Any]) -> DTensor | None:
    """The first sharded tensor of our meshes among arguments and lists of them, else the first of any layout."""
    found = [x for x in tree_leaves(values) if isinstance(x, DTensor) and is_ours(x.device_mesh)]
    return next((x for x in found if any(isinstance(p, Shard) for p in x.placements)), found[0] if found else None)
