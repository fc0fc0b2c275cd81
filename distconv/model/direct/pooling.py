"""Pools in the direct path: maxima of windows, and the averages of adaptive pools. A rank fetches what its outputs
read, or combines partial averages with other ranks; the rest is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.paths import layer, path
from distconv.model.direct.shaped_layout import ShapedLayout, shaped_layout
from distconv.model.direct.shares import apply
from distconv.rules.operands.own_parts import carried
from distconv.rules.operands.sums import lowest
from distconv.rules.pooling.adaptive import AdaptivePlan, averaged, averaged_backward, make_adaptive_plan
from distconv.rules.pooling.operator import adaptive, forward_of
from distconv.rules.pooling.window import WindowPlan, make_window_plan
from distconv.rules.registrations import past_kernel
from distconv.rules.schemas import operator
from distconv.transfer.exchange import Exchanges


class _Fetched(torch.autograd.Function):
    """What the windows of a rank read, with a value beyond the edge of the whole."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, exchanges: Exchanges, fill: float) -> Tensor:
        ctx.exchanges = exchanges
        wide = exchanges.fetch(local, fill)
        return wide[...] if wide is local else wide

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            return carried(grad, ctx.exchanges, back=True), None, None
        return ctx.exchanges.adjoint(grad), None, None


def _numbers(value: Any, dims: int) -> tuple[int, ...] | None:
    """An argument of a pool with a number for each dim of space; None for other things than numbers."""
    values = (value,) * dims if type(value) is int else tuple(value) if isinstance(value, list | tuple) else ()
    return values if len(values) == dims and all(type(each) is int for each in values) else None


def _maximum(function: Callable[..., Any], local_pool: Callable[..., Tensor], dims: int) -> None:
    func = operator(f"max_pool{dims}d_with_indices")

    def planned(place: ShapedLayout, dtype: torch.dtype, *given: Any) -> tuple[WindowPlan, ShapedLayout] | None:
        kernel, stride, padding, dilation, ceil_mode = given
        steps = kernel if stride is None or stride == [] else stride
        numbers = [_numbers(each, dims) for each in (kernel, steps, padding, dilation)]
        if not place.is_plain or len(place.shape) != dims + 2 or None in numbers or type(ceil_mode) is not bool:
            return None
        options = dict(zip(("kernel_size", "stride", "padding", "dilation"), numbers, strict=True))
        plan = make_window_plan(
            *(func, place.mesh, place.placements, tuple(place.shape), dtype), **options, ceil_mode=ceil_mode
        )
        return None if plan.single else (plan, place.of_shape(plan.out_shape))

    @path(function)
    def maximum_path(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if type(input) is not Activation or input.share is not None or return_indices:
            return NotImplemented
        place, own = input.place, input.local()
        given = kernel_size, stride, padding, dilation, ceil_mode
        if list in map(type, given):
            return NotImplemented
        key = function, own.dtype, given
        known = place.plans.get(key, False)
        if known is False:
            known = place.plans[key] = planned(place, own.dtype, *given)
        if known is None or known[0].empty:
            return NotImplemented
        plan, output = known
        if plan.exchanges.exchanges:
            own = apply(_Fetched, own, plan.exchanges, lowest(own.dtype, True))
        return activation(local_pool(own, *plan.arguments), output)


_maximum(F.max_pool2d, torch.max_pool2d, 2)
_maximum(F.max_pool3d, torch.max_pool3d, 3)


@layer("max_pool2d", "extra_repr", nn.MaxPool2d)
@layer("max_pool3d", "extra_repr", nn.MaxPool3d)
def _largest(pool: Any, module: Any, x: Activation) -> Any:
    windows = module.kernel_size, module.stride, module.padding, module.dilation
    return pool(x, *windows, module.ceil_mode, module.return_indices)


class _Average(torch.autograd.Function):
    """This rank's averages of an adaptive pool. Linear in x, and `_AverageBackward` is its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, func: Any, plan: AdaptivePlan) -> Tensor:
        ctx.save_for_backward(x)
        ctx.how = func, plan
        return averaged(forward_of(func), x, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return apply(_AverageBackward, grad, x.detach(), *ctx.how), None, None


class _AverageBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, func: Any, plan: AdaptivePlan) -> Tensor:
        ctx.how = func, plan
        return averaged_backward(func, grad, x, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return apply(_Average, grad, *ctx.how), None, None, None


def _average(function: Callable[..., Any], dims: int) -> None:
    func, backward = adaptive("avg", dims), adaptive("avg", dims, "_backward")
    name = f"aten::adaptive_avg_pool{dims}d"

    def planned(place: ShapedLayout, dtype: torch.dtype, size: Any) -> tuple[AdaptivePlan, ShapedLayout] | None:
        numbers = _numbers(size, dims)
        if numbers is None or not place.is_plain or len(place.shape) != dims + 2:
            return None
        mesh, shape = place.mesh, tuple(place.shape)
        plan = make_adaptive_plan(func, mesh, place.placements, shape, dtype, numbers)
        return plan, shaped_layout(mesh, plan.placements, torch.Size(plan.out_shape))

    @path(function)
    def average_path(input: Any, output_size: Any) -> Any:
        if type(input) is not Activation or input.share is not None or isinstance(output_size, list):
            return NotImplemented
        place, own = input.place, input.local()
        key = function, own.dtype, output_size
        known = place.plans.get(key, False)
        if known is False:
            known = place.plans[key] = planned(place, own.dtype, output_size)
        if known is None:
            return NotImplemented
        plan, output = known
        if plan.bins:
            return activation(apply(_Average, own, backward, plan), output)
        if not place.is_filled:
            return NotImplemented
        return activation(past_kernel(name, own, function, own, output_size), output)


_average(F.adaptive_avg_pool2d, 2)
_average(F.adaptive_avg_pool3d, 3)


@layer("adaptive_avg_pool2d", "extra_repr", nn.AdaptiveAvgPool2d)
@layer("adaptive_avg_pool3d", "extra_repr", nn.AdaptiveAvgPool3d)
def _mean(pool: Any, module: Any, x: Activation) -> Any:
    return pool(x, module.output_size)
