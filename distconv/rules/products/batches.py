"""Products of matrices and of batches of them, such as linear layers after a flatten, or queries with keys.

For every mesh axis a plan says what it shards of the product: batches (samples, heads), rows, columns, or the summed
dim, whose partial products are added up. The layout that moves least is chosen, and in batches rows stay where they
are. So the scores q k^T are sharded as the queries are, the keys move to them, and a softmax over keys finds whole
rows. Fetched operands are not kept: backward fetches them once more, and the ranks' gradients of them are added at
their owners. The gradient of a parameter stays a partial sum for its bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.rules.operands.layouts import broadcast_layout, moving
from distconv.rules.operands.own_parts import Added, apply, as_own_part, carried, wrapped
from distconv.rules.registry import above_autograd
from distconv.tensors.layouts import find_layout, placements_on
from distconv.transfer.redistribution import unsharding
from distconv.transfer.route import Transfer
from distconv.transfer.tracing import planned

aten = torch.ops.aten

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class ProductPlan:
    """The layouts of a (..., n, k) and b (..., k, m) before and during the product, and of the product."""

    first: tuple[Placements, Placements]  # Those of a: as shards, and gathered where the product needs it whole.
    second: tuple[Placements, Placements]
    result: Placements
    added: tuple[int, ...]  # The axes whose partial products are added up.


@planned(4096)
def make_product_plan(
    mesh: DeviceMesh, of_a: Placements, shape_a: tuple[int, ...], of_b: Placements, shape_b: tuple[int, ...]
) -> ProductPlan:
    """The plan of a product of matrices whose other dims broadcast: what each axis shards."""
    shape = (*torch.broadcast_shapes(shape_a[:-2], shape_b[:-2]), shape_a[-2], shape_b[-1])
    rows, columns = Shard(len(shape_a) - 2), Shard(len(shape_b) - 1)
    summed = Shard(len(shape_a) - 1), Shard(len(shape_b) - 2)
    sums = 2 * math.prod(shape)  # Elements that are sent to add up partial products.
    whole, ways = Replicate(), list[tuple[Placement, Placement, Placement]]()
    for axis, (p, q) in enumerate(zip(of_a, of_b, strict=True)):
        ranks = mesh.size(axis)
        choices: list[tuple[Placement, Placement, Placement]] = []
        for placement, own in ((p, shape_a), (q, shape_b)):
            if isinstance(placement, Shard) and placement.dim < len(own) - 2 and own[placement.dim] > 1:
                batch = placement.dim + len(shape) - len(own)
                a, b = (broadcast_layout(of[:-2], [Shard(batch)], shape[:-2])[0] for of in (shape_a, shape_b))
                choices.append((a, b, Shard(batch)))
        if p == rows:
            choices.append((rows, whole, Shard(len(shape) - 2)))
        if q == columns and (p != rows or len(shape) == 2):
            choices.append((whole, columns, Shard(len(shape) - 1)))
        if p == summed[0] or q == summed[1]:
            choices.append((*summed, whole))
        if ranks == 1 or not choices:
            choices = [(whole, whole, whole)]
        operands = [moving(p, a, shape_a, ranks) + moving(q, b, shape_b, ranks) for a, b, _ in choices]
        costs = [cost + (sums if way[:2] == summed else 0) for cost, way in zip(operands, choices, strict=True)]
        ways.append(choices[costs.index(min(costs))])
    firsts, seconds, results = zip(*ways, strict=True)
    added = tuple(axis for axis, way in enumerate(ways) if way[:2] == summed)
    # Of what every rank makes all, each rank has all of the gradient: nothing is to be added at a tensor's own ranks.
    parted = [isinstance(result, Shard) or axis in added for axis, result in enumerate(results)]
    return ProductPlan((_kept(of_a, firsts, parted), firsts), (_kept(of_b, seconds, parted), seconds), results, added)


def _kept(before: Placements, during: Sequence[Placement], parted: Sequence[bool]) -> Placements:
    """The layout from which the product's is made by gathering alone, along the axes whose ranks make parts of it."""
    return tuple(
        p if isinstance(p, Shard) and not isinstance(to, Shard) and by else to
        for p, to, by in zip(before, during, parted, strict=True)
    )


class Product(torch.autograd.Function):
    """The product of matrices that transfers fetch, which are not kept: backward fetches them once more."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, of_a: Transfer, of_b: Transfer) -> Tensor:
        ctx.save_for_backward(a, b)
        wide_a, wide_b = of_a.fetch(a), of_b.fetch(b)
        ctx.transfers, ctx.shapes = (of_a, of_b), (wide_a.shape, wide_b.shape)
        return torch.matmul(wide_a, wide_b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        a, b = ctx.saved_tensors
        of_a, of_b = ctx.transfers
        da = db = None
        if ctx.needs_input_grad[0]:
            da = torch.matmul(grad, carried(b, of_b).mT.conj()).sum_to_size(ctx.shapes[0])
            da = carried(da, of_a, back=True)
        if ctx.needs_input_grad[1]:
            wide = carried(a, of_a)
            # In memory it has the strides of b.
            db = wide.mT.conj() @ grad if b.stride(-1) == 1 else (grad.mT @ wide.conj()).mT
            db = carried(db.sum_to_size(ctx.shapes[1]), of_b, back=True)
        return da, db, None, None


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (..., n, k) times b (..., k, m), of DTensors or plain tensors, other dims broadcast. Differentiable."""
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"shapes cannot be multiplied: {tuple(a.shape)} and {tuple(b.shape)}")
    if not isinstance(a, DTensor) and not isinstance(b, DTensor):  # beside a sharded tensor that is added
        return torch.matmul(a, b)
    mesh, _ = find_layout(a, b)
    plan = make_product_plan(mesh, placements_on(a, mesh), tuple(a.shape), placements_on(b, mesh), tuple(b.shape))
    parts, transfers = [], []
    for x, (before, during) in ((a, plan.first), (b, plan.second)):
        # Where each rank makes its own part of the product, of what is replicated, gradients are to be added.
        summed = [
            axis
            for axis, (p, of) in enumerate(zip(before, plan.result, strict=True))
            if p.is_replicate() and isinstance(of, Shard)
        ]
        parts.append(as_own_part(x, mesh, before, summed))
        transfers.append(unsharding(mesh, before, during, tuple(x.shape)))
    if any(transfer.exchanges for transfer in transfers):
        local = apply(Product, *parts, *transfers)
    else:
        local = torch.matmul(*parts)
    if plan.added:
        local = apply(Added, local, mesh, plan.added)
    return wrapped(
        local, mesh, plan.result, (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    )


@above_autograd("aten::matmul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``aten::matmul``; of tensors of one or two dims by the rules of what it is made of."""
    if min(a.dim(), b.dim()) < 2 or max(a.dim(), b.dim()) < 3:
        return aten.matmul.default.decompose(a, b)
    return product(a, b)


@above_autograd("aten::mm")
@above_autograd("aten::bmm")
def multiplied(a: Tensor, b: Tensor) -> Tensor:
    """a ([batch,] n, k) times b ([batch,] k, m)."""
    if a.dim() != b.dim() or a.dim() not in (2, 3) or a.shape[:-2] != b.shape[:-2]:
        raise RuntimeError(f"a product of {tuple(a.shape)} and {tuple(b.shape)}")
    return product(a, b)


@above_autograd("aten::addmm")
@above_autograd("aten::baddbmm")
def multiplied_and_added(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta x + alpha a b; where beta is 0, nothing of x is read."""
    result = multiplied(a, b)
    result = result if alpha == 1 else result * alpha
    if beta == 0:
        return result
    return result + (x if beta == 1 else x * beta)
