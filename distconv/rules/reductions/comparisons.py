"""Whether two whole tensors are equal, or close."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.operands import part_of
from distconv.rules.operands.layouts import common_layout
from distconv.rules.operands.sums import all_reduce
from distconv.rules.registry import rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import replicated
from distconv.transfer.collectives import MIN


@rule("aten::equal")
def equal(func: Any, x: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and elements; every rank gets the same answer."""
    if x.shape != other.shape:
        return False
    mesh, placements = common_layout(x, other)
    equal = func(part_of(x, mesh, placements), part_of(other, mesh, placements))
    flag = torch.tensor(int(equal), device=mesh.device_type)
    every = all_reduce(flag, mesh, range(mesh.ndim), MIN)
    return bool(wrap(every, mesh, replicated(mesh), ()).item())


@rule("aten::allclose")
def allclose(
    func: Any, x: DTensor, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Whether all elements of the whole tensors are close."""
    close: Any = torch.isclose(x, other, rtol, atol, equal_nan).all()
    return bool(close._local_tensor)
