"""The gradients of a batch norm as functions that autograd records, for gradients of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.rules.normalization.batch import batch_share
from distconv.rules.normalization.combining import Share
from distconv.rules.normalization.statistics import vector_layout
from distconv.rules.operands.as_gradient import as_gradient
from distconv.rules.operands.channel_split import norm_input
from distconv.rules.operands.own_parts import Added, brought, wrapped
from distconv.rules.operands.sums import precise
from distconv.rules.registry import above_autograd
from distconv.tensors.mesh import sharded_dims
from distconv.tensors.mesh_options import batch_norm_statistics
from distconv.transfer.all_reduce import all_reduced

aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]


class _Sum(torch.autograd.Function):
    """Of the tensors of all ranks of a share, each of which goes on with the sum by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return all_reduced(x.clone(), share.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.share), None


def batch_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, share: Share | None, eps: float, kept: tuple[Tensor, Tensor] | None
) -> Gradients:
    """dL/dx, and this rank's shares of dL/dweight and dL/dbias, of this rank's tensors.

    ``share``: the ranks over which statistics go, None for this one alone. ``kept``: mean and variance, in evaluation.
    """
    dims, dtype = [0, *range(2, x.dim())], precise(x.dtype)
    row = (1, -1, *[1] * (x.dim() - 2))
    g, wide = grad.to(dtype), x.to(dtype)

    def mean(values: Tensor) -> Tensor:
        total = values.sum(dims, keepdim=True)
        if share is None:
            return total / max(values.numel() // max(values.shape[1], 1), 1)
        return _Sum.apply(total, share) / share.total

    centre, square = (mean(wide), None) if kept is None else (kept[0].view(row), kept[1].view(row))
    centred = wide - centre
    inverse = torch.rsqrt((mean(centred * centred) if square is None else square) + eps)
    normal = centred * inverse
    scaled = g if weight is None else g * weight.to(dtype).view(row)
    dx = scaled if kept is not None else scaled - mean(scaled) - normal * mean(scaled * normal)
    of = dtype if weight is None else weight.dtype
    return (dx * inverse).to(x.dtype), (g * normal).sum(dims).to(of), g.sum(dims).to(of)


@above_autograd("aten::native_batch_norm_backward")
def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_inverse: Tensor | None,
    training: bool,
    eps: float,
    mask: list[bool],
) -> Any:
    """dL/dx, dL/dweight and dL/dbias of a batch norm. Differentiable."""
    if not torch.is_grad_enabled():
        given = grad, x, weight, running_mean, running_var, save_mean, save_inverse, training, eps, mask
        with torch._C._AutoDispatchBelowAutograd():
            return aten.native_batch_norm_backward.default(*given)
    mesh, placements = norm_input(aten.native_batch_norm_backward.default, x, grad, weight)
    own = batch_norm_statistics.get(mesh) == "local"
    placements = placements if own else as_gradient(placements, grad)
    of = vector_layout(placements)
    samples = tuple(axis for axis, dim in sharded_dims(mesh, placements) if dim != 1)
    kept = None
    if not training:
        assert running_mean is not None and running_var is not None
        kept = brought(running_mean, mesh, of), brought(running_var, mesh, of)
    dx, dweight, dbias = batch_norm_gradients(
        brought(grad, mesh, placements),
        brought(x, mesh, placements),
        None if weight is None else brought(weight, mesh, of, samples),
        None if own else batch_share(mesh, placements, x.shape),
        eps,
        kept,
    )
    vectors = [wrapped(Added.apply(each, mesh, samples), mesh, of, x.shape[1:2]) for each in (dweight, dbias)]
    found = wrapped(dx, mesh, placements, x.shape), *vectors
    return tuple(each if wanted else None for each, wanted in zip(found, mask, strict=True))
