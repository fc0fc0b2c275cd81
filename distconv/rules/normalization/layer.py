"""Layer normalization: statistics of each position over the last dims, sharded or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distconv.rules.normalization.combining import (
    Share,
    of_all,
)
from distconv.rules.normalization.moments import (
    count,
    moments,
    precise,
)
from distconv.rules.normalization.statistics import (
    normalize,
    normalize_backward,
    share,
)
from distconv.rules.registry import rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import input_layout
from distconv.transfer.local_part import local_as


def _layer_placements(
    placements: Sequence[Placement], lead: int
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """(of the weight, of its gradient) for a layer norm of the dims from ``lead`` on."""
    weight = tuple(Shard(p.dim - lead) if isinstance(p, Shard) and p.dim >= lead else Replicate() for p in placements)
    grad = tuple(
        Partial() if isinstance(p, Shard) and p.dim < lead else of for p, of in zip(placements, weight, strict=True)
    )
    return weight, grad


def _input(func: Any, x: Tensor, *others: Any) -> tuple[DeviceMesh, tuple[Placement, ...], Tensor]:
    """(mesh, placements, local tensor) of the input."""
    mesh, placements = input_layout(func, x, *others)
    return mesh, placements, x._local_tensor if isinstance(x, DTensor) else x


def sample_placements(placements: Sequence[Placement], lead: int) -> tuple[Placement, ...]:
    """The layout of a tensor's statistics over its dims from ``lead`` on."""
    return tuple(p if isinstance(p, Shard) and p.dim < lead else Replicate() for p in placements)


def _share(mesh: DeviceMesh, placements: tuple[Placement, ...], x: Tensor, lead: int) -> Share | None:
    return share(mesh, placements, tuple(x.shape), tuple(range(lead, x.dim())))


@rule("aten::native_layer_norm")
def layer_norm(
    func: Any, x: Tensor, normalized: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[DTensor, DTensor, DTensor]:
    """y, and the mean and 1 / sqrt(variance + eps) of every position of the dims before the normalized ones."""
    mesh, placements, local = _input(func, x, weight, bias)
    lead = x.dim() - len(normalized)
    if lead < 0 or list(x.shape[lead:]) != list(normalized):
        raise RuntimeError(f"{func}: an input {tuple(x.shape)} does not end in the normalized shape {list(normalized)}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and list(vector.shape) != list(normalized):
            raise RuntimeError(f"{func}: its {name} has shape {tuple(vector.shape)}; accepted: {tuple(normalized)}")
    of_weight, _ = _layer_placements(placements, lead)
    w, b = (None if v is None else local_as(v, mesh, of_weight) for v in (weight, bias))
    over, outer = _share(mesh, placements, x, lead), list(local.shape[:lead])
    if over is None and local.numel():
        y, mean, inverse = func(local, normalized, w, b, eps)
    else:
        rows = local.reshape(1, math.prod(outer), math.prod(local.shape[lead:]))
        mean, variance = moments(rows)
        if over is not None:
            mean, variance = of_all(mean, variance, over)
        square = variance + eps
        y = normalize(rows, mean, square, None, None).view(local.shape)
        y = y if w is None else y * w.to(y.dtype)
        y = y if b is None else y + b.to(y.dtype)
        shape = [*outer, *[1] * len(normalized)]
        mean, inverse = mean.view(shape), torch.rsqrt(square).view(shape)
    kept, whole = sample_placements(placements, lead), [*x.shape[:lead], *[1] * len(normalized)]
    return wrap(y, mesh, placements, x.shape), wrap(mean, mesh, kept, whole), wrap(inverse, mesh, kept, whole)


@rule("aten::native_layer_norm_backward")
def layer_norm_backward(
    func: Any,
    grad: Tensor,
    x: Tensor,
    normalized: list[int],
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """dL/dx as x is laid out; dL/dweight and dL/dbias partial over shards before, sharded as the normalized dims."""
    mesh, placements, local = _input(func, x, grad, weight)
    lead = x.dim() - len(normalized)
    of_weight, of_grad = _layer_placements(placements, lead)
    w = None if weight is None else local_as(weight, mesh, of_weight)
    b = None if bias is None else local_as(bias, mesh, of_weight)
    own_grad, kept = local_as(grad, mesh, placements), sample_placements(placements, lead)
    means, inverses = local_as(mean, mesh, kept), local_as(inverse, mesh, kept)
    over = _share(mesh, placements, x, lead)
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    if over is None and local.numel():
        dx, dweight, dbias = func(own_grad.contiguous(), local, normalized, means, inverses, w, b, mask)
    else:
        dtype = precise(local.new_empty(0)).dtype
        shape, inner = (1, math.prod(local.shape[:lead]), math.prod(local.shape[lead:])), local.shape[lead:]
        rows, centre, square = local.reshape(shape), means.to(dtype).flatten(), inverses.to(dtype).flatten().pow(-2)
        weighted = own_grad if w is None else own_grad * w.to(own_grad.dtype)
        total = count(rows) if over is None else over.total
        dx, _, _ = normalize_backward(weighted.reshape(shape), rows, centre, square, None, over, total, None, mask[0])
        dx = None if dx is None else dx.view(local.shape)
        dweight = dbias = None
        if mask[1]:
            hat = normalize(rows, centre, square, None, None)
            dweight = (own_grad.reshape(shape) * hat)[0].sum(0).view(inner)
        if mask[2]:
            dbias = own_grad.reshape(shape)[0].sum(0).view(inner)
    dtype = x.dtype if weight is None else weight.dtype
    dweight, dbias = (
        wrap(v.to(dtype), mesh, of_grad, normalized) if used and v is not None else None
        for v, used in zip((dweight, dbias), mask[1:], strict=True)
    )
    return None if dx is None or not mask[0] else wrap(dx, mesh, placements, x.shape), dweight, dbias
