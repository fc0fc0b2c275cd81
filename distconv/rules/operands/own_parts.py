"""From DTensors to this rank's plain tensors and back, differentiable: autograd handles what is between by itself.

A layer saves its weight for backward. In one process it saves the parameter itself, so backward reads what was assigned
to the parameter's `data` since. A rule saves a view of the parameter's local tensor: it is noted here (`derived`), and
given the new memory behind ``parameter.data = other`` (`rebind`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.utils.weak import TensorWeakRef

from distconv.rules.operands.sums import all_reduce, towards_parameter
from distconv.rules.whole.copies import follow_changes, watch_changes
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import replicated
from distconv.tensors.refusal import UnsupportedOperation
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import redistributed
from distconv.transfer.route import Transfer


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` of plain tensors and DTensors, without the checks that this makes of them first."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    found = _applies.get(function)
    if found is None:
        found = _applies[function] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found(*args)


_applies: dict[type[torch.autograd.Function], Any] = {}
"""Torch's own `apply` of each function, which `super` takes longer to find than a dict."""


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: tuple[Placement, ...], summed: tuple[int, ...]) -> Tensor:
        watch_changes()  # of x, whose memory what follows may save
        mesh = x.device_mesh
        ctx.layout, ctx.placements, ctx.summed = (mesh, placements, tuple(x.shape)), tuple(x.placements), summed
        # Unlike a view of the same shape, an index keeps all strides.
        return derived(x, local_as(x, mesh, placements)[...])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        mesh, placements, shape = ctx.layout
        if ctx.summed:
            if towards_parameter() and not torch.is_grad_enabled():
                later = [Partial() if axis in ctx.summed else p for axis, p in enumerate(placements)]
                return wrap(grad, mesh, later, shape), None, None
            grad = apply(Added, grad, mesh, ctx.summed)
        if torch.is_grad_enabled():
            return redistributed(wrapped(grad, mesh, placements, shape), mesh, ctx.placements), None, None
        return wrap(grad, mesh, placements, shape), None, None  # of what was cut, its parts: nothing is gathered


class _Wrapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
    ) -> DTensor:
        ctx.layout = mesh, placements
        return wrap(local.detach(), mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return as_own_part(grad, *ctx.layout), None, None, None


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, transfer: Transfer, back: bool) -> Tensor:
        ctx.way = transfer, back
        result = transfer.adjoint(local) if back else transfer.fetch(local)
        return result[...] if result is local else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        transfer, back = ctx.way
        return carried(grad, transfer, not back), None, None


def carried(local: Tensor, transfer: Transfer, back: bool = False) -> Tensor:
    """The result of a transfer's fetch, or of its adjoint if ``back``. Differentiable."""
    return apply(_Carried, local, transfer, back)


class Added(torch.autograd.Function):
    """The sum of the ranks' plain tensors along some axes; all ranks continue with the same result."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh, axes: tuple[int, ...]) -> Tensor:
        ctx.along = mesh, axes
        return all_reduce(local, mesh, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Where a script has added the plain sum to a DTensor, its gradient is one.
        mesh, axes = ctx.along
        grad = as_own_part(grad, mesh, replicated(mesh)) if isinstance(grad, DTensor) else grad
        return apply(Apart, grad, mesh, axes), None, None


class Apart(torch.autograd.Function):
    """A tensor that is equal on the ranks of some axes, and used separately on each: the gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, axes: tuple[int, ...]) -> Tensor:
        ctx.along = mesh, axes
        return x[...]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return apply(Added, grad, *ctx.along), None, None


def wrapped(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The DTensor whose part on this rank is ``local``. Differentiable."""
    return apply(_Wrapped, local, mesh, tuple(placements), tuple(shape))


def as_own_part(
    x: DTensor | Tensor, mesh: DeviceMesh, placements: Sequence[Placement], summed: Sequence[int] = ()
) -> Tensor:
    """This rank's part of a tensor laid out as the placements say; a plain one counts as replicated. Differentiable.

    ``summed``: the axes along which the gradients of the ranks' parts, which are equal, are to be added.
    """
    if not isinstance(x, DTensor):
        if not x.requires_grad:
            return local_as(x, mesh, placements)
        x = wrapped(x, mesh, replicated(mesh), x.shape)
    pairs = zip(x.placements, placements, strict=True)
    if x.device_mesh != mesh or not all(p == to or (p.is_replicate() and to.is_shard()) for p, to in pairs):
        return derived(x, apply(_Local, redistributed(x, mesh, placements), tuple(placements), tuple(summed)))
    return apply(_Local, x, tuple(placements), tuple(summed))


class Taker(Protocol):
    """Takes a gradient from the backward that has computed it."""

    def __call__(self, grad: Tensor) -> Tensor:
        """Called once for each backward. Returns what is passed on as the gradient."""

    def arriving(self, tensor: Tensor) -> Tensor:
        """The tensor for functions that autograd records in backward: their gradient is taken, too."""


Takes = Sequence[Taker | None]  # Of a layer's weight and bias.


def taken(grad: Tensor | None, take: Taker | None) -> Tensor | None:
    """What is passed on as a gradient, after it was given to what takes it, if anything."""
    return grad if grad is None or take is None else take(grad)


_NAME = "_distconv_derived"


def derivable(parameter: DTensor) -> DTensor:
    """A parameter's DTensor, of whose local tensor it is noted from now on what rules make of it."""
    setattr(parameter._local_tensor, _NAME, [])
    return parameter


def derived(x: DTensor, local: Tensor) -> Tensor:
    """Notes a view of x's local tensor, or a copy, where x is a parameter's DTensor, and returns it."""
    views: list[Any] | None = getattr(x._local_tensor, _NAME, None)
    if views is not None:
        is_view = local.untyped_storage()._cdata == x._local_tensor.untyped_storage()._cdata
        views.append(TensorWeakRef(local) if is_view else None)
        if not is_view:
            follow_changes(x, local)
    return local


def has_copies(local: Tensor) -> bool:
    """Whether a rule reads a copy of a parameter's local tensor, and so not what is written to its memory."""
    return None in getattr(local, _NAME, ())


def rebind(local: Tensor, other: Tensor) -> None:
    """Gives a parameter's local tensor, and the views that rules have made of it, the memory of another tensor.

    ``local``: in the shape and dtype of ``other``.

    Raises:
        UnsupportedOperation: where a rule has read a copy, or a part that has no place in the other's memory.
    """
    for view in getattr(local, _NAME, ()):
        part = None if view is None else view()
        if view is not None and part is None:
            continue  # nothing reads it any more
        if part is None or (part.shape != local.shape and other.stride() != local.stride()):
            raise UnsupportedOperation(
                f"a parameter {tuple(local.shape)} on this rank: its data was replaced after a layer had used it in"
                f" another layout; accepted: before the layer uses it, or in place"
            )
        if part.shape == local.shape:
            part.data = other
        else:
            start = other.storage_offset() + part.storage_offset() - local.storage_offset()
            part.data = other.as_strided(part.shape, part.stride(), start)
    local.data = other
