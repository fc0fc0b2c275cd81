"""Operators that combine elements along some dims and are independent along all others: running sums, sorting, Fourier
transforms, gathering and scattering along a dim, and linear algebra on batches of matrices.

Where none of the combined dims is sharded, every rank computes on its shard. Where one is, a single all-to-all moves
its shards to other dims, so that a rank still has no more than its share, and another moves the result back.

The product of all elements, or along a dim, has the gradient that one process computes. For a tensor without zeros that
divides the product by each element; for one with zeros it multiplies all others. The two differ where an element is
NaN: for this element the first gives NaN, the second a number. For subclasses of tensors torch always does the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from distconv.rules.operands.layouts import joined_layout, layout_beside, part_of, reduced_layout
from distconv.rules.operands.own_parts import apply
from distconv.rules.operands.sums import all_reduce
from distconv.rules.reductions import Reduction
from distconv.rules.registry import above_autograd, rule
from distconv.rules.schemas import full_name, named_arguments
from distconv.rules.whole import permit, whole_or_refused
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import local_shape, replicated
from distconv.transfer.collectives import PRODUCT
from distconv.transfer.redistribution import redistributed_data

Arguments = dict[str, Any]  # The arguments of an operator by name, defaults included.


@dataclass(frozen=True)
class CombinedDims:
    """Along which dims an operator combines elements of its first tensor."""

    dims: Callable[[Arguments, int], Iterable[int]]  # From the arguments and the number of dims.
    reduces: bool = False  # Whether results lack these dims, unless the argument keepdim is true.
    returns: bool = True
    """Whether results are laid out as the first tensor was; else they stay where they were computed."""
    empty: bool = True
    """Whether the operator accepts tensors without elements. Else it gets one of one element a dim in their place."""


def _along(name: str) -> Callable[[Arguments, int], Iterable[int]]:
    def dims(arguments: Arguments, _: int) -> Iterable[int]:
        value = arguments[name]
        return [value] if isinstance(value, int) else value

    return dims


def _matrices(arguments: Arguments, ndim: int) -> Iterable[int]:
    return (-2, -1)


def _space(arguments: Arguments, ndim: int) -> Iterable[int]:
    return range(-len(arguments["output_size"]), 0)


def _slices(arguments: Arguments, ndim: int) -> Iterable[int]:
    return [dim for dim in range(ndim) if dim != arguments["dim"] % ndim]


ALONG = CombinedDims(_along("dim"))

COMBINED: dict[str, CombinedDims] = {
    **dict.fromkeys(("logcumsumexp", "_logcumsumexp", "cummax", "cummin", "sort", "sort.stable"), ALONG),
    **dict.fromkeys(
        ("kthvalue", "mode", "median.dim", "nanmedian.dim"), CombinedDims(_along("dim"), reduces=True, empty=False)
    ),
    **dict.fromkeys(("gather", "scatter.src", "scatter.value", "scatter_add", "scatter_reduce.two"), ALONG),
    **dict.fromkeys(("index_copy", "index_fill.int_Scalar", "index_fill.int_Tensor", "index_reduce"), ALONG),
    "linalg_cross": ALONG,
    **dict.fromkeys(("max_unpool2d", "max_unpool3d"), CombinedDims(_space, empty=False)),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), CombinedDims(_along("dim"), empty=False)),
    "renorm": CombinedDims(_slices),
    **dict.fromkeys(("linalg_matrix_exp", "cholesky_inverse"), CombinedDims(_matrices)),
    **dict.fromkeys(
        (
            *("cholesky", "linalg_cholesky_ex", "linalg_inv_ex", "linalg_qr", "_linalg_svd", "_linalg_eigh"),
            *("linalg_eig", "_linalg_det", "_linalg_slogdet", "linalg_lu", "linalg_lu_factor_ex"),
            *("geqrf", "linalg_ldl_factor_ex"),
        ),
        CombinedDims(_matrices, returns=False),
    ),
}
"""The operators, each with its dims."""


@rule(*(f"aten::{name}" for name in COMBINED))
def along(func: Any, *args: Any, **kwargs: Any) -> Any:
    """On shards of the dims along which no elements are combined."""
    return computed_along(func, args, kwargs, COMBINED[full_name(func)])


def computed_along(func: Any, args: Sequence[Any], kwargs: dict[str, Any], combined: CombinedDims) -> Any:
    """An operator on shards of the dims along which it does not combine elements."""
    arguments = named_arguments(func, args, kwargs)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    x, ndim = tensors[0], tensors[0].dim()
    of_same_dims = [t for t in tensors if t.dim() == ndim]
    if not any(isinstance(t, DTensor) for t in of_same_dims):
        return whole_or_refused(func, args, kwargs, "beside a plain tensor of other dims it is not computed in parts")
    mesh, placements = joined_layout(of_same_dims)
    if not ndim or not x.numel() or any(p.is_shard() and not isinstance(p, Shard) for p in placements):
        return whole_or_refused(func, args, kwargs, "it has no elements or no dims")
    combined_dims = {dim % ndim for dim in combined.dims(arguments, ndim)}
    # Along a dim in which its tensors differ they cannot be cut in the same way.
    apart = combined_dims | {d for t in of_same_dims for d in range(ndim) if t.shape[d] != x.shape[d]}
    target = layout_beside(mesh, placements, tuple(x.shape), frozenset(apart))
    if target is None:
        return whole_or_refused(func, args, kwargs, f"it needs whole dims {sorted(apart)}, and no other can be sharded")
    others = [t for t in tensors if t.dim() != ndim and isinstance(t, DTensor)]
    permit(func, others, f"it is needed whole beside one of other dims {tuple(x.shape)}")

    def here(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return part_of(value, mesh, target if value.dim() == ndim else replicated(mesh))

    removed = sorted(combined_dims) if combined.reduces and not arguments.get("keepdim") else []
    local = local_shape(mesh, target, x.shape)
    own, named_own = [here(value) for value in args], {name: here(value) for name, value in kwargs.items()}
    if combined.empty or 0 not in local:
        results = func(*own, **named_own)
    else:
        results = _of_stand_ins(func, own, named_own, local, removed)
    back = (
        reduced_layout(placements, tuple(combined_dims), not removed, Replicate()) if combined.reduces else placements
    )

    def laid_out(local: Tensor) -> DTensor:
        reduced = reduced_layout(target, removed, False, Replicate())
        shape = list(local.shape)
        for p, q in zip(reduced, target, strict=True):
            if isinstance(p, Shard) and isinstance(q, Shard):
                shape[p.dim] = x.shape[q.dim]
        y = wrap(local, mesh, reduced, shape)
        return redistributed_data(y, mesh, back) if combined.returns else y

    return tuple(map(laid_out, results)) if isinstance(results, tuple) else laid_out(results)


def _of_stand_ins(
    func: Any, args: list[Any], kwargs: dict[str, Any], shape: Sequence[int], removed: Sequence[int]
) -> Any:
    """The empty results of an empty shard, from an operator that accepts none: it gets one element a dim instead."""
    empty = [dim for dim, extent in enumerate(shape) if not extent]

    def stand_in(value: Any) -> Any:
        same = isinstance(value, Tensor) and value.dim() == len(shape)
        return value.new_zeros([max(extent, 1) for extent in value.shape]) if same else value

    results = func(*map(stand_in, args), **{name: stand_in(value) for name, value in kwargs.items()})

    def emptied(local: Tensor) -> Tensor:
        for dim in empty:
            local = local.narrow(dim - sum(other < dim for other in removed), 0, 0)
        return local

    return tuple(map(emptied, results)) if isinstance(results, tuple) else emptied(results)


aten = torch.ops.aten


@rule("aten::prod", "aten::prod.dim_int")
def total_product(
    func: Any, x: DTensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> DTensor:
    """The product of the ranks' products."""
    work = Reduction(func, x, dim, keepdim)
    if x.is_complex() and work.axes:  # of these, no allreduce makes products
        if dim is None:
            return whole_or_refused(func, (x,), {"dtype": dtype}, "of complex numbers; accepted: .prod(dim)")
        return computed_along(func, (x, dim, keepdim), {"dtype": dtype}, CombinedDims(_along("dim"), reduces=True))
    own = work.local.to(dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64))
    for each in work.dims:
        own = own.prod(each, keepdim=True)
    return work.wrap(all_reduce(own, work.mesh, work.axes, PRODUCT))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            y: Tensor = aten.prod.default(x) if dim is None else aten.prod.dim_int(x, dim, keepdim)
        ctx.dim, ctx.keepdim = dim, keepdim
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, y = ctx.saved_tensors
        if ctx.dim is not None and x.dim() and not ctx.keepdim:
            grad, y = grad.unsqueeze(ctx.dim), y.unsqueeze(ctx.dim)
        if not x.numel():
            return torch.zeros_like(x), None, None
        if not x.dim():
            return grad * y.conj(), None, None
        divided, zeros = grad * (y / x).conj(), x == 0
        if ctx.dim is not None:
            return torch.where(zeros.any(), grad * _of_others(x, ctx.dim).conj(), divided), None, None
        others = grad * _of_others(x.reshape(-1), 0).reshape(x.shape).conj()
        if not torch.is_grad_enabled():  # what would be zero times infinity is zero beside two zeros
            others = torch.where(zeros.sum() > 1, 0, others)
        return torch.where(zeros.any(), others, divided), None, None


def _of_others(x: Tensor, dim: int) -> Tensor:
    """The product of all elements along dim but each one itself."""
    one = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([one, x.narrow(dim, 0, x.shape[dim] - 1)], dim).cumprod(dim)
    behind = torch.cat([one, x.narrow(dim, 1, x.shape[dim] - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * behind


@above_autograd("aten::prod")
@above_autograd("aten::prod.dim_int")
def product_of_elements(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The product of all elements, or along a dim."""
    if dtype is None and not (x.is_floating_point() or x.is_complex()):
        dtype = torch.int64
    return apply(_Product, x if dtype is None else x.to(dtype), dim, keepdim)
