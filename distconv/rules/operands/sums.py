"""Sums over ranks: the allreduce that rules share, and what each rank adds to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from distconv.tensors.autograd_nodes import PARAMETER_USES, PARAMETER_VIEWS
from distconv.tensors.layouts import Layout, layout_of
from distconv.tensors.refusal import refuse
from distconv.transfer.collectives import MAX, MIN, SUM, all_reduced
from distconv.transfer.group import joint_group
from distconv.transfer.redistribution import added

VIEWS = {
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze")
}
"""torch's autograd nodes that may be between a parameter and its use; no function of Python has such a node."""


def all_reduce(local: Tensor, mesh: DeviceMesh, axes: Sequence[int], op: Any = SUM) -> Tensor:
    """The reduction of ``local`` over mesh axes, by one collective. A new tensor."""
    along = tuple(axis for axis in axes if mesh.size(axis) > 1)
    result = local.clone(memory_format=torch.contiguous_format)
    if along:
        result = all_reduced(result, joint_group(mesh, along), op)
    return result.to(local.dtype)


def extreme(local: Tensor, mesh: DeviceMesh, axes: Sequence[int], largest: bool) -> Tensor:
    """The largest or smallest elements over mesh axes, by one collective. Not a number where any rank has none.

    What collectives make of an element that is not a number depends on the rank that has it. So marks of such
    elements are sent beside the numbers.
    """
    op = MAX if largest else MIN
    if not local.dtype.is_floating_point or all(mesh.size(axis) == 1 for axis in axes):
        return all_reduce(local, mesh, axes, op)
    none = local.isnan()
    marks = none.to(local.dtype) if largest else -none.to(local.dtype)
    found, marked = all_reduce(
        torch.stack([local.masked_fill(none, lowest(local.dtype, largest)), marks]), mesh, axes, op
    )
    return found.masked_fill(marked != 0, math.nan)


def settled(func: Any, x: DTensor) -> tuple[Tensor, Layout]:
    """The local tensor and the layout of ``x``, its partial sums added. Refuses odd placements."""
    x = added(x)
    if any(placement.is_shard() and not isinstance(placement, Shard) for placement in x.placements):
        raise refuse(func, f"its input is laid out as {x.placements}")
    return x._local_tensor, layout_of(x)


def towards_parameter() -> bool:
    """Whether autograd is computing the gradient of a model's parameter, or of its transpose or view."""
    node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
    followers = [following for following, _ in node.next_functions if following] if node is not None else []
    views = [following for following in followers if following.name() in VIEWS or following in PARAMETER_VIEWS]
    deeper = [following for view in views for following, _ in view.next_functions if following]
    return any(following in PARAMETER_USES for following in (*followers, *deeper))


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of numbers of a dtype are kept."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def lowest(dtype: torch.dtype, largest: bool) -> float | int | bool:
    """The smallest number of a type, or without ``largest`` the largest: it loses every comparison."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max
