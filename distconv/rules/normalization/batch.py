"""Batch normalization: statistics of each channel over samples and space; the ranks that share a channel combine
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from distconv.rules.normalization.combining import (
    Share,
    of_all,
)
from distconv.rules.normalization.moments import (
    count,
    moments,
    precise,
)
from distconv.rules.normalization.running import can_wait, combine_later, move
from distconv.rules.normalization.statistics import (
    alike,
    check_vector,
    gradients,
    normalize,
    normalize_backward,
    share,
    vector_layout,
)
from distconv.rules.operands.as_gradient import as_gradient
from distconv.rules.operands.channel_split import norm_input
from distconv.rules.registry import rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import dim_axes, layout, replicated
from distconv.tensors.mesh_options import batch_norm_statistics
from distconv.transfer.local_part import local_as

aten = torch.ops.aten


@rule("aten::native_batch_norm")
def batch_norm(
    func: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[DTensor, DTensor, DTensor]:
    """y, and the mean and 1 / sqrt(variance + eps) of each channel; updates the running statistics.

    These are always those of the whole batch, alike on all ranks, even where each rank normalizes by its own.
    """
    mesh, placements = norm_input(func, x, weight, bias)
    local, channels, of = local_as(x, mesh, placements), x.shape[1], vector_layout(placements)
    named = {"weight": weight, "bias": bias, "running mean": running_mean, "running variance": running_var}
    for name, vector in named.items():
        check_vector(func, vector, name, channels)
    w, b = (None if vector is None else local_as(vector, mesh, of) for vector in (weight, bias))
    if training:
        mean, variance = _statistics(local, mesh, placements, x.shape, (running_mean, running_var), momentum)
        square = variance + eps
        saved, shape = (mean, torch.rsqrt(square)), (channels,)
    else:
        if running_mean is None or running_var is None:
            raise RuntimeError(f"{func}: evaluation without running statistics")
        mean, square = local_as(running_mean, mesh, of), local_as(running_var, mesh, of) + eps
        saved, shape, of = (mean.new_empty(0), mean.new_empty(0)), (0,), replicated(mesh)
    y = normalize(local, mean, square, w, b)
    return wrap(y, mesh, placements, x.shape), wrap(saved[0], mesh, of, shape), wrap(saved[1], mesh, of, shape)


def _statistics(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int],
    running: tuple[Tensor | None, Tensor | None],
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """The mean and variance by which this rank normalizes; moves the running ones by those of the whole batch."""
    over, own = batch_share(mesh, placements, shape), batch_norm_statistics.get(mesh) == "local"
    mean, variance = moments(local)
    if own and running == (None, None):
        return mean, variance
    axes = dim_axes(mesh, placements, 1)
    if own and over is not None and can_wait(running):
        combine_later(running, mean, variance, over, mesh, axes, momentum)
        return mean, variance
    whole = (mean, variance) if over is None else of_all(mean, variance, over)
    total = count(local) if over is None else over.total
    for buffer, value, factor in zip(running, whole, (1.0, total / max(total - 1, 1)), strict=True):
        if buffer is not None:
            move(buffer, value, mesh, axes, momentum, factor)
    return (mean, variance) if own else whole


# torch.compile knows batch norm by three names, for what it changes is told by the operator's schema.
rule("aten::_native_batch_norm_legit")(batch_norm)


@rule("aten::_native_batch_norm_legit.no_stats")
def batch_norm_without_running(
    func: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[DTensor, DTensor, DTensor]:
    """The same without running statistics."""
    return batch_norm(func, x, weight, bias, None, None, training, momentum, eps)


@rule("aten::_native_batch_norm_legit_no_training")
def batch_norm_in_evaluation(
    func: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[DTensor, DTensor, DTensor]:
    """The same by the running statistics."""
    return batch_norm(func, x, weight, bias, running_mean, running_var, False, momentum, eps)


def batch_share(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int]) -> Share | None:
    """The ranks among which the elements of a channel lie."""
    return share(mesh, placements, tuple(shape), (0, *range(2, len(shape))))


@rule("aten::native_batch_norm_backward")
def batch_norm_backward(
    func: Any,
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
) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """dL/dx as x is laid out, dL/dweight and dL/dbias as partial sums."""
    mesh, placements = norm_input(func, x, grad, weight)
    if batch_norm_statistics.get(mesh) != "local":
        placements = as_gradient(placements, grad)
    local, of = local_as(x, mesh, placements), vector_layout(placements)
    w = None if weight is None else local_as(weight, mesh, of)
    own_grad = local_as(grad, mesh, placements)
    over: Share | None = None
    inverse: Tensor | None = None
    if training:
        assert save_mean is not None and save_inverse is not None
        inverse = local_as(save_inverse, mesh, of)
        mean, square = local_as(save_mean, mesh, of), inverse.pow(-2)
        if batch_norm_statistics.get(mesh) != "local":
            over = batch_share(mesh, placements, x.shape)
    else:
        assert running_mean is not None and running_var is not None
        mean, square = local_as(running_mean, mesh, of), local_as(running_var, mesh, of) + eps
    dtype = precise(local.new_empty(0)).dtype
    mean, square, w32 = mean.to(dtype), square.to(dtype), None if w is None else w.to(dtype)
    inverse = None if inverse is None else inverse.to(dtype)
    dx: Tensor | None = None
    if training or not local.numel():
        total = count(local) if over is None else over.total
        need = mask[0] and training
        dx, dweight, dbias = normalize_backward(
            own_grad, local, mean, square, w32, over, total, None, need, 0.0, inverse
        )
        if mask[0] and not training:
            dx = torch.empty_like(local)
    else:
        dx, dweight, dbias = aten.native_batch_norm_backward.default(
            *alike(own_grad, local), w32, mean, square, None, None, False, 0.0, [mask[0], True, True]
        )
    vectors = dweight if mask[1] else None, dbias if mask[2] else None
    return gradients(mesh, placements, x, dx if mask[0] else None, dtype if w is None else w.dtype, vectors)


@rule("aten::cudnn_batch_norm", "aten::miopen_batch_norm")
def library_batch_norm(func: Any, x: Tensor, *arguments: Any) -> tuple[DTensor, ...]:
    """Batch norm on a GPU with cuDNN or MIOpen: here the same as everywhere."""
    y, mean, inverse = batch_norm(func, x, *arguments)
    mesh, _ = layout(y)
    reserve = torch.empty(0, dtype=torch.uint8, device=y._local_tensor.device)
    extra = wrap(reserve, mesh, replicated(mesh), reserve.shape)
    return (y, mean, inverse, extra) if "cudnn" in func._schema.name else (y, mean, inverse)


@rule("aten::cudnn_batch_norm_backward", "aten::miopen_batch_norm_backward")
def library_batch_norm_backward(
    func: Any,
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor,
    save_inverse: Tensor,
    eps: float,
    *_: Tensor,
) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """The backward of training by ``library_batch_norm``."""
    statistics = running_mean, running_var, save_mean, save_inverse
    return batch_norm_backward(func, grad, x, weight, *statistics, True, eps, [True, True, True])
