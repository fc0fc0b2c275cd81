"""Windows of a dim as a new dim (Tensor.unfold, nn.Unfold, nn.Fold): each rank fetches what its windows read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv.rules.operands.layouts import layout_beside
from distconv.rules.operands.sums import settled
from distconv.rules.registry import rule
from distconv.rules.whole import whole_or_refused
from distconv.rules.whole.copies import copy_of
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import dim_axes, layout_of, local_shape, owners
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.needs import window
from distconv.transfer.redistribution import redistributed_data
from distconv.transfer.tracing import planned

aten = torch.ops.aten


@planned(1024)
def _reads(mesh: DeviceMesh, axes: tuple[int, ...], dim: int, extent: int, size: int, step: int) -> Exchange:
    """Fetches what the windows read that a rank owns."""
    windows = owners(mesh, axes, (extent - size) // step + 1)
    needs = tuple(window((a * step, (b - 1) * step + size), extent) if b > a else () for a, b in windows)
    return exchange(mesh, axes, dim, owners(mesh, axes, extent), needs)


@rule("aten::unfold", "aten::unfold_copy")
def unfold(func: Any, x: DTensor, dim: int, size: int, step: int) -> DTensor:
    """x (..., L, ...) as (..., windows, ..., size); windows are sharded as L is."""
    shape = tuple(torch.empty(x.shape, device="meta").unfold(dim, size, step).shape)
    dim = dim % max(x.dim(), 1)
    local, (mesh, placements) = settled(func, x)
    axes = dim_axes(mesh, placements, dim) if x.dim() else ()
    if axes:
        local = _reads(mesh, axes, dim, x.shape[dim], size, step).fetch(local)
    own = local_shape(mesh, placements, shape)
    result = func(local, dim, size, step) if 0 not in own else local.new_empty(own)
    y = wrap(result, mesh, placements, shape)
    return y if "copy" in func._schema.name else copy_of(y, x)


@rule("aten::unfold_backward")
def unfold_backward(func: Any, grad: DTensor, shape: list[int], dim: int, size: int, step: int) -> DTensor:
    """The gradient of x, laid out as that of its windows."""
    mesh, placements = layout_of(grad)
    whole = layout_beside(mesh, tuple(placements), tuple(grad.shape), frozenset({grad.dim() - 1}))
    if whole is None:
        return whole_or_refused(func, (grad, shape, dim, size, step), {}, "it needs the last dim whole")
    own, placements = redistributed_data(grad, mesh, whole)._local_tensor, whole
    dim = dim % max(len(shape), 1)
    axes = dim_axes(mesh, placements, dim) if shape else ()
    wide = list(local_shape(mesh, placements, shape))
    reads = _reads(mesh, axes, dim, shape[dim], size, step) if axes else None
    if reads is not None:
        wide[dim] = reads.plan.extent
    local = func(own, wide, dim, size, step) if own.numel() else own.new_zeros(wide)
    return wrap(local if reads is None else reads.adjoint(local), mesh, placements, shape)


def _sides(x: Sequence[int], size: Sequence[int], *options: Sequence[int]) -> list[tuple[int, ...]]:
    """(dim, dilated size of the window, dilation, padding and stride) of both dims of space."""
    dilation, padding, stride = options
    dims = (len(x) - 2, len(x) - 1)
    reach = [d * (k - 1) + 1 for k, d in zip(size, dilation, strict=True)]
    return list(zip(dims, reach, dilation, padding, stride, strict=True))


@rule("aten::im2col")
def patches(func: Any, x: DTensor, size: list[int], *options: list[int]) -> DTensor:
    """x ([N,] C, H, W) as ([N,] C kh kw, positions): windows, and then a view, which moves shards to the positions."""
    padding = options[1]
    y = aten.constant_pad_nd(x, [padding[1], padding[1], padding[0], padding[0]], 0)
    for dim, reach, step, _, stride in _sides(x.shape, size, *options):
        y = aten.slice(aten.unfold_copy(y, dim, reach, stride), -1, 0, None, step)
    *front, high, wide, _, _ = range(y.dim())
    positions = y.shape[high] * y.shape[wide]
    y = y.permute(*front, y.dim() - 2, y.dim() - 1, high, wide)
    return aten.clone(aten.reshape(y, [*x.shape[:-3], x.shape[-3] * math.prod(size), positions]))


@rule("aten::col2im")
def patches_added(func: Any, grad: DTensor, space: list[int], size: list[int], *options: list[int]) -> DTensor:
    """The sum of all patches at their places: the transpose of im2col."""
    sides, padding = _sides([*grad.shape[:-2], 0, *space], size, *options), options[1]
    padded = [extent + 2 * p for extent, p in zip(space, padding, strict=True)]
    counts = [(extent - reach) // s + 1 for extent, (_, reach, _, _, s) in zip(padded, sides, strict=True)]
    channels = grad.shape[-2] // math.prod(size)
    front = [*grad.shape[:-2], channels]
    y = aten.reshape(grad, [*front, *size, *counts])
    n = len(front)
    y = y.permute(*range(n), n + 2, n + 3, n, n + 1)
    # The window's columns first, which im2col made last.
    (dim, reach, step, _, s) = sides[1]
    y = aten.slice_backward(y, [*front, *counts, size[0], reach], y.dim() - 1, 0, reach, step)
    y = aten.unfold_backward(y, [*front, counts[0], padded[1], size[0]], dim, reach, s)
    (dim, reach, step, _, s) = sides[0]
    y = aten.slice_backward(y, [*front, counts[0], padded[1], reach], y.dim() - 1, 0, reach, step)
    y = aten.unfold_backward(y, [*front, *padded], dim, reach, s)
    return aten.constant_pad_nd(y, [-padding[1], -padding[1], -padding[0], -padding[0]], 0)
