"""Linear layers with whole parameters in the direct path: a rank multiplies the rows that it has.

Along an axis that replicates the rows, as one of space does behind a pool over all of it, each rank makes the same
product. Of their gradients of a parameter, which are equal, that of the axis's first rank counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.operands import converts_operands, operands
from distconv.model.direct.paths import layer, path
from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.model.direct.shares import apply
from distconv.rules.operands.own_parts import Takes, taken
from distconv.rules.registrations import past_kernel
from distconv.tensors.layouts import replicated
from distconv.tensors.mesh import splits_channels


class _LinearCall(NamedTuple):
    """A linear layer of these shapes and layouts, on this rank."""

    output: ShapedLayout
    counts: bool  # Whether this rank's gradients of the parameters count.


def _call(x: ShapedLayout, weight: ShapedLayout, bias: ShapedLayout | None) -> _LinearCall | None:
    """None if the direct path does not apply."""
    mesh, last = x.mesh, len(x.shape) - 1
    if last < 1 or not x.is_plain or splits_channels(mesh) or Shard(last) in x.placements:
        return None
    for place in (weight, bias):
        if place is not None and not (place.mesh == mesh and place.has_parts_of(replicated(mesh))):
            return None
    filters = weight.shape[:1]
    if len(weight.shape) != 2 or weight.shape[1] != x.shape[last] or not (bias is None or bias.shape == filters):
        return None  # the other path raises torch's error
    whole = [axis for axis, placement in enumerate(x.placements) if placement.is_replicate()]
    return _LinearCall(x.of_shape((*x.shape[:-1], *filters)), all(mesh.get_local_rank(axis) == 0 for axis in whole))


@path(F.linear, parameters=True)
def linear_path(input: Any, weight: Any, bias: Any = None) -> Any:
    """x weight^T + bias. Takes parameters as modules pass them."""
    if type(input) is not Activation or input.share is not None:
        return NotImplemented
    found = operands(weight, bias)
    if found is None:
        return NotImplemented
    w, b = found
    place, own = input.place, input.local()
    key = "linear", w.place, b.place
    call = place.plans.get(key, False)
    if call is False:
        call = place.plans[key] = _call(place, *key[1:])
    if call is None or converts_operands(own) or own.is_complex():
        return NotImplemented
    if place.is_spread:
        return activation(past_kernel("aten::linear", own, F.linear, own, w.root, b.root), call.output)
    (own_weight, take_w), (own_bias, take_b) = w.handed(), b.handed()
    return activation(apply(_Linear, own, own_weight, own_bias, call.counts, (take_w, take_b)), call.output)


@layer("linear", "extra_repr", nn.Linear)
def _linear(multiply: Any, module: Any, x: Activation) -> Any:
    parameters = module._parameters
    if "weight" not in parameters or "bias" not in parameters:
        return NotImplemented
    return multiply(x, parameters["weight"], parameters["bias"])


class _Linear(torch.autograd.Function):
    """The layer where some ranks have the same rows. Gradients of the parameters are this rank's shares, which are
    handed to ``takes``: zeros, unless they count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, counts: bool, takes: Takes) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.takes = counts, takes
        with torch._C._AutoDispatchBelowAutograd():
            return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        take_weight, take_bias = ctx.takes
        if torch.is_grad_enabled():  # what autograd records now has gradients of the weight, too
            weight = weight if take_weight is None else take_weight.arriving(weight)
            weight = weight if ctx.counts else apply(_Uncounted, weight)
        rows = grad.flatten(0, -2)
        dx = grad @ weight if need_x else None
        dw = _share(rows.t() @ x.flatten(0, -2), ctx.counts) if need_weight else None
        db = _share(rows.sum(0), ctx.counts) if need_bias else None
        return dx, taken(dw, take_weight), taken(db, take_bias), None, None


def _share(grad: Tensor, counts: bool) -> Tensor:
    return grad if counts else apply(_NoShare, grad)


class _NoShare(torch.autograd.Function):
    """Zeros in the place of a gradient that another rank has, too. Its derivative is that of the gradient: all ranks
    compute on with the sum of their shares."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return apply(_Uncounted, grad)


class _Uncounted(torch.autograd.Function):
    """A parameter, of which this rank's gradients do not count."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter[...]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return apply(_NoShare, grad)
