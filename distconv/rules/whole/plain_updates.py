"""In-place changes of a plain tensor by a distributed one, such as a moving average of sharded parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from distconv.rules.whole import permit
from distconv.tensors.dtensors import wrap
from distconv.tensors.mesh import sharded_dims
from distconv.tensors.refusal import refuse
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import unsharded

_PASS_ON = (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor, torch.ops.aten.sub_.Tensor)
"""Operators whose gradient is that of the plain tensor, times a number."""


def whole_beside(func: Any, x: Any) -> Any:
    """A DTensor as the plain tensor that changes another in place; anything else as it is.

    Its shards are gathered, so that every rank's plain tensor becomes what it would be in one process. Collective.
    Where a gradient is wanted it may be copied or added, within the bounds of `permit`: every rank has the whole
    gradient of the plain tensor, and cuts from it that of its shard. Of what is multiplied, there is no way back.
    """
    if not isinstance(x, DTensor):
        return x
    mesh = x.device_mesh
    if all(placement.is_replicate() for placement in x.placements):
        return x._local_tensor
    if (
        torch.is_grad_enabled()
        and x.requires_grad
        and any(mesh.size(axis) > 1 for axis, _ in sharded_dims(mesh, x.placements))
    ):
        if func in _PASS_ON:
            permit(func, [x], "which is written to a plain tensor, and needs a gradient")
            x.register_hook(functools.partial(_cut, x.device_mesh, x.placements))
            return unsharded(x)
        raise refuse(
            func,
            f"in place on a plain tensor, with a tensor {tuple(x.shape)} laid out as {x.placements}: use"
            f" distconv.gather on that first, or .detach() where no gradient is wanted",
            whole_helps=False,
        )
    return unsharded(x)


def _cut(mesh: DeviceMesh, placements: Sequence[Placement], grad: Tensor) -> Tensor:
    """A whole gradient, the same on every rank, as that of shards."""
    if isinstance(grad, DTensor):
        return grad
    return wrap(local_as(grad, mesh, placements), mesh, placements, grad.shape)
