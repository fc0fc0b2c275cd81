"""Sums, means, variances, norms and extrema over sharded dims: the value of the whole tensor, with uneven shards too.

A result is whole on every rank at once, so that whatever follows is plain, be it `.item()` or arithmetic. Only a sum
that is a parameter's gradient stays partial: parameters add theirs up in buckets.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from distconv.rules.operands.layouts import canonical_dims, common_layout, part_of, reduced_layout
from distconv.rules.operands.sums import all_reduce, extreme, lowest, precise, settled, towards_parameter
from distconv.rules.registry import rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import replicated
from distconv.tensors.mesh import sharded_dims
from distconv.transfer.collectives import MAX, MIN


def reduced_shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> tuple[int, ...]:
    return tuple(1 if dim in dims else extent for dim, extent in enumerate(shape) if keepdim or dim not in dims)


def reduced_axes(mesh: DeviceMesh, placements: Sequence[Placement], dims: Sequence[int]) -> list[int]:
    return [axis for axis, dim in sharded_dims(mesh, placements) if dim in dims]


class Reduction:
    """One tensor's reduction over dims: what its result's layout is, and how to make it from local results."""

    def __init__(self, func: Any, x: DTensor, dims: int | Sequence[int] | None, keepdim: bool) -> None:
        self.local, (self.mesh, self.placements) = settled(func, x)
        self.dims, self.keepdim, self.whole = canonical_dims(dims, x.dim()), keepdim, x.shape
        self.axes = reduced_axes(self.mesh, self.placements, self.dims)
        self.shape = reduced_shape(x.shape, self.dims, keepdim)
        self.count = math.prod(x.shape[dim] for dim in self.dims)

    def wrap(self, kept: Tensor) -> DTensor:
        """The result, from this rank's part with the reduced dims kept."""
        local = kept if self.keepdim else kept.reshape(reduced_shape(kept.shape, self.dims, False))
        placements = reduced_layout(self.placements, self.dims, self.keepdim, Replicate())
        return wrap(local, self.mesh, placements, self.shape)

    def sum(self, local: Tensor, **options: Any) -> Tensor:
        """The whole sum of a local tensor, the reduced dims kept."""
        return all_reduce(torch.sum(local, self.dims, keepdim=True, **options), self.mesh, self.axes)

    def mean(self, local: Tensor, **options: Any) -> Tensor:
        """The whole mean, not a number where there are no elements; the reduced dims kept."""
        return self.sum(local, **options) * math.nan if not self.count else self.sum(local, **options) / self.count

    def extremum(self, local: Tensor, largest: bool) -> Tensor:
        """The whole maximum or minimum, the reduced dims kept."""
        if not self.count:
            raise IndexError(f"max(): Expected reduction dims of a tensor {tuple(self.whole)} to have non-zero size")
        if any(not local.shape[dim] for dim in self.dims):
            own = local.new_full(reduced_shape(local.shape, self.dims, True), lowest(local.dtype, largest))
        else:
            own = (torch.amax if largest else torch.amin)(local, self.dims, keepdim=True)
        return extreme(own, self.mesh, self.axes, largest)


@rule("aten::sum", "aten::sum.dim_IntList")
def total(
    func: Any, x: DTensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> DTensor:
    """Sums over any dims. Partial where it is a parameter's gradient."""
    gradient = towards_parameter()
    if gradient and all(p.is_partial("sum") for p in x.placements if p.is_partial()):
        dims = canonical_dims(dims, x.dim())
        local = torch.sum(x._local_tensor, dims, keepdim, dtype=dtype)
        placements = reduced_layout(x.placements, dims, keepdim, Partial())
        return wrap(local, x.device_mesh, placements, reduced_shape(x.shape, dims, keepdim))
    work = Reduction(func, x, dims, keepdim)
    return work.wrap(work.sum(work.local, dtype=dtype))


@rule("aten::mean", "aten::mean.dim")
def mean(
    func: Any, x: DTensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> DTensor:
    """The mean of all elements of the whole dims."""
    if not (dtype or x.dtype).is_floating_point and not (dtype or x.dtype).is_complex:
        raise RuntimeError(f"mean(): input dtype should be either floating point or complex dtypes. Got {x.dtype}")
    work = Reduction(func, x, dims, keepdim)
    return work.wrap(work.mean(work.local, dtype=dtype))


@rule("aten::amax", "aten::amin", "aten::max", "aten::min")
def extremum(func: Any, x: DTensor, dims: Any = (), keepdim: bool = False) -> DTensor:
    """The largest or smallest element over dims."""
    work = Reduction(func, x, dims, keepdim)
    return work.wrap(work.extremum(work.local, func._schema.name.endswith("max")))


@rule("aten::var_mean.correction", "aten::std_mean.correction")
def spread_and_mean(
    func: Any, x: DTensor, dims: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[DTensor, DTensor]:
    """Variance, or standard deviation, with the correction of the whole count, and mean."""
    work = Reduction(func, x, dims, keepdim)
    mean = work.mean(work.local)
    away = work.local - mean
    squares = work.sum((away.abs() if away.is_complex() else away).square())
    variance = squares / max(work.count - (1.0 if correction is None else correction), 0.0)
    return work.wrap(variance.sqrt() if "std" in func._schema.name else variance), work.wrap(mean)


@rule("aten::var.correction", "aten::std.correction")
def spread(func: Any, x: DTensor, dims: Any = None, **options: Any) -> DTensor:
    """Variance, or standard deviation, alone."""
    return spread_and_mean(func, x, dims, **options)[0]


@rule("aten::linalg_vector_norm", "aten::norm.Scalar", "aten::norm.ScalarOpt_dim")
def vector_norm(
    func: Any,
    x: DTensor,
    ord: float | None = 2,
    dims: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> DTensor:
    """(sum of |x|^ord)^(1/ord) over dims; the extreme |x| for an infinite ord, the count of non-zeros for 0."""
    work = Reduction(func, x, dims, keepdim)
    sizes, ord = work.local.to(dtype or x.dtype).abs(), 2 if ord is None else ord
    if math.isinf(ord):
        result = work.extremum(sizes, ord > 0)
    elif ord == 0:
        result = work.sum((sizes != 0).to(sizes.dtype))
    elif ord == 2:
        result = work.sum(sizes.square()).sqrt()
    else:
        result = work.sum(sizes.pow(ord)).pow(1 / ord)
    return work.wrap(result)


@rule("aten::logsumexp")
def logsumexp(func: Any, x: DTensor, dims: Any, keepdim: bool = False) -> DTensor:
    """log(sum(exp(x))) over dims, without overflow."""
    work = Reduction(func, x, dims, keepdim)
    if not work.count:
        return work.wrap(work.sum(work.local).log())
    peak = work.extremum(work.local, True)
    peak = torch.where(peak.isinf(), torch.zeros_like(peak), peak)
    return work.wrap(work.sum((work.local - peak).exp()).log() + peak)


@rule("aten::all", "aten::all.dim", "aten::all.dims", "aten::any", "aten::any.dim", "aten::any.dims")
def truth(func: Any, x: DTensor, dims: Any = None, keepdim: bool = False) -> DTensor:
    """Whether all, or any, elements over dims are true."""
    work = Reduction(func, x, dims, keepdim)
    every = func._schema.name.endswith("all")
    flags = work.local.bool()
    own = functools.reduce(lambda t, dim: (torch.all if every else torch.any)(t, dim, keepdim=True), work.dims, flags)
    found = all_reduce(own, work.mesh, work.axes, MIN if every else MAX)
    return work.wrap(found.byte() if x.dtype == torch.uint8 else found)  # of bytes torch makes bytes


@rule("aten::count_nonzero", "aten::count_nonzero.dim_IntList")
def count_nonzero(func: Any, x: DTensor, dims: Any = None) -> DTensor:
    """The number of nonzero elements over dims."""
    work = Reduction(func, x, dims, False)
    return work.wrap(work.sum(work.local != 0))


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


@rule("aten::_softmax", "aten::_log_softmax")
def softmax(func: Any, x: DTensor, dim: int, half_to_float: bool) -> DTensor:
    """exp(x) over its sum along dim, or the logarithm of that; laid out as x is."""
    local, (mesh, placements) = settled(func, x)
    axes = reduced_axes(mesh, placements, [dim % max(x.dim(), 1)])
    if not axes:
        return wrap(func(local, dim, half_to_float), mesh, placements, x.shape)
    wide = local.to(precise(local.dtype))
    shape = list(local.shape)
    shape[dim] = 1
    own = wide.amax(dim, keepdim=True) if local.shape[dim] else wide.new_full(shape, lowest(wide.dtype, True))
    shifted = wide - all_reduce(own, mesh, axes, MAX)
    total = all_reduce(shifted.exp().sum(dim, keepdim=True), mesh, axes)
    result = shifted - total.log() if "log" in func._schema.name else shifted.exp() / total
    return wrap(result if half_to_float else result.to(local.dtype), mesh, placements, x.shape)


@rule("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def softmax_backward(func: Any, grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> DTensor:
    """The gradient of x from the result y, laid out as y is where that is sharded; one of the two may be plain."""
    mesh, placements = common_layout(y, grad)
    own, local = part_of(grad, mesh, placements), part_of(y, mesh, placements)
    axes = reduced_axes(mesh, placements, [dim % max(y.dim(), 1)])
    if not axes:
        return wrap(func(own, local, dim, input_dtype), mesh, placements, y.shape)
    if "log" in func._schema.name:
        dx = own - local.exp() * all_reduce(own.sum(dim, keepdim=True), mesh, axes)
    else:
        dx = local * (own - all_reduce((own * local).sum(dim, keepdim=True), mesh, axes))
    return wrap(dx.to(input_dtype), mesh, placements, y.shape)
