"""Stacks numbers from several meshes, such as the gradient norms of layers under different partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.registry import rule
from distconv.rules.stock import stock
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import replicated
from distconv.tensors.refusal import refuse
from distconv.transfer.partial_sums import added


@rule("aten::stack")
def stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> DTensor:
    """Numbers on several meshes are equal on all ranks once their partial sums are added."""
    distributed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    mesh = distributed[0].device_mesh
    if all(tensor.device_mesh == mesh for tensor in distributed):
        # torch 2.11 counts a negative dim from the end of an operand, and the result says that it is sharded elsewhere.
        return stock(func, (tensors, dim + tensors[0].dim() + 1 if dim < 0 else dim))
    if any(tensor.dim() for tensor in tensors):
        raise refuse(func, f"tensors on two meshes: {dict.fromkeys(t.device_mesh for t in distributed)}")
    numbers = [added(tensor)._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return wrap(torch.stack(numbers, dim), mesh, replicated(mesh), (len(numbers),))
