"""Products of matrices whose rows, columns or summed dim are sharded, as linear layers after a flatten need them.

Where the summed dim is sharded, each rank multiplies its part, and the parts are added at once. The gradient of a
parameter stays a partial sum for its bucket. Where an axis shards the two matrices by different subscripts, the layout
that moves least is chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distconv.rules.operands import Operand, common_subscripts, part_of
from distconv.rules.operands.sums import all_reduce, towards_parameter
from distconv.rules.registry import rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import added_up, find_layout, replicated
from distconv.transfer.tracing import planned


def _placements_of(x: Tensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Its layout, with partial sums added up."""
    return tuple(added_up(x.placements)) if isinstance(x, DTensor) else replicated(mesh)


ROWS, SUMMED, COLUMNS = 0, 1, 2
"""The subscripts of a product: a (n, k) times b (k, m)."""


def _product(a: Tensor, b: Tensor) -> tuple[Tensor, DeviceMesh, list[Placement], list[int]]:
    """(local product, mesh, its layout with summed axes replicated, axes yet to be summed over)."""
    mesh, _ = find_layout(a, b)
    if a.shape[1] != b.shape[0]:
        raise RuntimeError(f"shapes cannot be multiplied: {tuple(a.shape)} and {tuple(b.shape)}")
    extents = (*a.shape, b.shape[1])
    operands = (
        Operand(_placements_of(a, mesh), tuple(a.shape), (ROWS, SUMMED)),
        Operand(_placements_of(b, mesh), tuple(b.shape), (SUMMED, COLUMNS)),
    )
    chosen = _chosen(mesh, operands, extents)
    parts = []
    for tensor, of in zip((a, b), operands, strict=True):
        lying = [of.sharded_by(subscript, extents[subscript or 0]) for subscript in chosen]
        parts.append(part_of(tensor, mesh, lying))
    result: list[Placement] = [Replicate() if s in (None, SUMMED) else Shard(int(s == COLUMNS)) for s in chosen]
    return torch.matmul(*parts), mesh, result, [axis for axis, s in enumerate(chosen) if s == SUMMED]


@planned(4096)
def _chosen(
    mesh: DeviceMesh, operands: tuple[Operand, Operand], extents: tuple[int, int, int]
) -> tuple[int | None, ...]:
    """The subscript that each axis shards: that of the one sharded tensor, or of both; what moves least where they
    differ.
    """
    least = common_subscripts(mesh, operands, extents, (ROWS, COLUMNS))
    chosen = []
    for axis, subscript in enumerate(least):
        ways = {x.subscript_along(axis) for x in operands} - {None}
        chosen.append(ways.pop() if len(ways) == 1 else subscript)
    return tuple(chosen)


def _added(a: Tensor, b: Tensor, alpha: float = 1) -> DTensor:
    product, mesh, placements, axes = _product(a, b)
    if alpha != 1:
        product = product * alpha
    shape = (a.shape[0], b.shape[1])
    if not towards_parameter():
        return wrap(all_reduce(product, mesh, axes) if axes else product, mesh, placements, shape)
    return wrap(product, mesh, [Partial() if axis in axes else p for axis, p in enumerate(placements)], shape)


@rule("aten::mm")
def mm(func: Any, a: Tensor, b: Tensor) -> DTensor:
    """a (n, k) times b (k, m)."""
    return _added(a, b)


@rule("aten::addmm")
def addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> DTensor:
    """beta bias + alpha a (n, k) times b (k, m); the bias is added once."""
    product = _added(a, b, alpha)
    return torch.add(product, bias if beta == 1 else bias * beta)  # type: ignore[return-value]


@rule("aten::mm.out")
def mm_out(func: Any, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """The product, written to a tensor."""
    return out.copy_(torch.mm(a, b))
