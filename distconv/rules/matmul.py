"""Products of matrices whose rows, columns or summed dim are sharded, as linear layers after a flatten need.

Where the summed dim is sharded each rank multiplies its part; the parts are added at once, but a parameter's gradient
stays a partial sum for its bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distconv.dtensors import wrap
from distconv.layouts import added_up, find_layout
from distconv.refusal import UnsupportedOperation
from distconv.rules.reduction import all_reduce, towards_parameter
from distconv.rules.registry import rule
from distconv.transfer.local_part import local_as


def _placements_of(x: Tensor, mesh: DeviceMesh) -> list[Placement]:
    """Its layout, with partial sums added up."""
    if not isinstance(x, DTensor):
        return [Replicate()] * mesh.ndim
    return list(added_up(x.placements))


def _product(func: Any, a: Tensor, b: Tensor, batch: int) -> tuple[Tensor, DeviceMesh, list[Placement], list[int]]:
    """(local product, mesh, its layout with summed axes replicated, axes yet to be summed over)."""
    mesh, _ = find_layout(a, b)
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise RuntimeError(f"shapes cannot be multiplied: {tuple(a.shape)} and {tuple(b.shape)}")
    rows, summed = batch, batch + 1  # dims of a; b's are the summed one and the columns
    left, right, result, axes = _placements_of(a, mesh), _placements_of(b, mesh), [], []
    for axis, (p, q) in enumerate(zip(left, right, strict=True)):
        of_a, of_b = (p.dim if isinstance(p, Shard) else None), (q.dim if isinstance(q, Shard) else None)
        if (of_a is not None and of_a < batch) or (of_b is not None and of_b < batch):
            if of_a is not None and of_b is not None and of_a != of_b:
                raise UnsupportedOperation(f"{func}: operands laid out as {tuple(left)} and {tuple(right)}")
            left[axis] = right[axis] = p if of_a is not None else q
            result.append(left[axis])
        elif of_a == summed or of_b == batch:
            if (of_a, of_b) in ((summed, batch + 1), (rows, batch)):
                raise UnsupportedOperation(f"{func}: operands laid out as {tuple(left)} and {tuple(right)}")
            left[axis], right[axis] = Shard(summed), Shard(batch)
            axes.append(axis)
            result.append(Replicate())
        elif of_a == rows and of_b == batch + 1:
            raise UnsupportedOperation(f"{func}: operands laid out as {tuple(left)} and {tuple(right)}")
        else:
            result.append(p if of_a is not None else q)
    product = torch.matmul(local_as(a, mesh, left), local_as(b, mesh, right))
    return product, mesh, result, axes


def _added(func: Any, a: Tensor, b: Tensor, batch: int, alpha: float = 1) -> DTensor:
    product, mesh, placements, axes = _product(func, a, b, batch)
    if alpha != 1:
        product = product * alpha
    shape = (*a.shape[:-1], b.shape[-1])
    if not towards_parameter():
        return wrap(all_reduce(product, mesh, axes) if axes else product, mesh, placements, shape)
    return wrap(product, mesh, [Partial() if axis in axes else p for axis, p in enumerate(placements)], shape)


@rule("aten::mm")
def mm(func: Any, a: Tensor, b: Tensor) -> DTensor:
    """a (n, k) times b (k, m)."""
    return _added(func, a, b, 0)


@rule("aten::addmm")
def addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> DTensor:
    """beta bias + alpha a (n, k) times b (k, m); the bias is added once."""
    product = _added(func, a, b, 0, alpha)
    return torch.add(product, bias if beta == 1 else bias * beta)  # type: ignore[return-value]
