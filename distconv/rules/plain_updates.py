"""A plain tensor that is changed in place by a distributed one, as a moving average of sharded parameters is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.layouts import replicated
from distconv.mesh import sharded_dims
from distconv.refusal import refuse
from distconv.transfer.redistribution import moved


def whole_beside(func: Any, x: Any) -> Any:
    """A DTensor as the plain tensor that changes another in place; anything else as it is.

    Its shards are gathered, so that every rank's plain tensor becomes what it would be in one process. Collective. Only
    where no gradient is wanted, for there is no way back for one.
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
        raise refuse(
            func,
            f"in place on a plain tensor, with a tensor {tuple(x.shape)} laid out as {x.placements}: use"
            f" distconv.gather on that first, or .detach() where no gradient is wanted",
            whole_helps=False,
        )
    whole: Tensor = moved(x, mesh, replicated(mesh))._local_tensor
    return whole
