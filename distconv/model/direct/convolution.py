"""Convolutions and padding in the direct path: torch's own where a rank needs no elements of others, else one with an
exchange. Padding is with zeros, or with elements of the tensor itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.chains.call import elements, spans_of
from distconv.model.direct.chains.convolution import ConvolutionCall, chained_convolution
from distconv.model.direct.operands import converts_operands, operands
from distconv.model.direct.paths import layer, path, running
from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.model.direct.shares import apply
from distconv.rules.convolution import Convolution
from distconv.rules.convolution.kernels import differs
from distconv.rules.convolution.plan import Side, make_convolution_plan
from distconv.rules.operands.channel_split import channel_layout, parameter_layout
from distconv.rules.registrations import past_kernel
from distconv.rules.views.padding import PaddingPlan, check_padding, padded, padding_plan
from distconv.tensors.layouts import local_shape
from distconv.tensors.mesh import channel_algorithm
from distconv.transfer.needs import OWN
from mucudnn.convolution.geometry import Window
from mucudnn.runtime.decision import marking


def _call(
    x: ShapedLayout,
    weight: ShapedLayout,
    bias: ShapedLayout | None,
    dtypes: tuple[torch.dtype | None, ...],
    arguments: tuple[Any, ...],
) -> ConvolutionCall | None:
    """None if the direct path does not apply."""
    mesh = x.mesh
    if any(dtype is not None and dtype.is_complex for dtype in dtypes):  # torch divides it into real convolutions
        return None
    if not x.is_spread or weight.mesh != mesh or channel_layout(mesh, x.placements) != x.placements:
        return None
    if parameter_layout(mesh, weight.placements, x.placements) != tuple(weight.placements):
        return None
    stride, padding, dilation, transposed, _, groups = arguments
    plan = make_convolution_plan(
        *(mesh, x.placements, tuple(x.shape), tuple(weight.shape), weight.placements, channel_algorithm(mesh)),
        *(dtypes, arguments),
    )
    parts = plan.split
    if not weight.has_parts_of(parts.weight) or not (bias is None or bias.has_parts_of(parts.vector)):
        return None
    without_halo = not plan.sides or (
        not transposed and all(_needs_no_halo(side, x, weight.shape, arguments) for side in plan.sides)
    )
    same_groups = len(parts.block.runs) == 1 and (groups == 1 or not parts.axes)
    alone = parts.is_whole and without_halo and same_groups and x.is_filled and 0 not in plan.out_local
    local_x, local_weight = (local_shape(mesh, at.placements, at.shape) for at in (x, weight))
    on_cpu = mesh.device_type == "cpu"
    alone = alone and not (on_cpu and differs(plan.onednn, local_x, local_weight, dtypes[0], arguments))
    # Convolutions that only this rank has are marked for muCUDNN, which torch's own function cannot do.
    alone = alone and not (plan.is_own and mesh.device_type in marking)
    output = x.of_shape(plan.out_shape)
    may_chain = plan.sides and not transposed and parts.is_whole and len(parts.block.runs) == 1
    spans = spans_of(x) if may_chain and spans_of(output) else ()
    windows = tuple(
        Window(weight.shape[span.dim], *(values[span.dim - 2] for values in (stride, padding, dilation)))
        for span in spans
    )
    operations = 2.0 * elements(output) * math.prod(weight.shape[1:])
    return ConvolutionCall(plan, alone, output, arguments, windows, operations)


def _needs_no_halo(side: Side, x: ShapedLayout, weight: Sequence[int], arguments: tuple[Any, ...]) -> bool:
    """Whether along a sharded dim torch's function on each rank's own inputs gives exactly the rank's own outputs."""
    stride, padding, dilation = (values[side.dim - 2] for values in arguments[:3])
    pieces, reach = side.inputs.plan.pieces, dilation * (weight[side.dim] - 1) + 1
    extent = local_shape(x.mesh, x.placements, x.shape)[side.dim]
    return (
        not padding
        and side.inputs.plan.silent
        and len(pieces) == 1
        and (pieces[0].source, pieces[0].start, pieces[0].step) == (OWN, 0, 1)
        and (extent - reach) // stride + 1 == side.own
    )


def _convolution(function: Any, dims: int, transposed: bool) -> None:
    def numbers(value: Any) -> tuple[int, ...]:
        return (value,) * dims if isinstance(value, int) else tuple(value)

    def convolution_path(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        output_padding: Any = 0,
    ) -> Any:
        x, out = input, output_padding
        if type(x) is not Activation or x.share is not None:
            return NotImplemented
        place: ShapedLayout = x._place if x.dtensor is None else x.place
        if isinstance(padding, str) or len(place.shape) != dims + 2:
            return NotImplemented
        found = operands(weight, bias)
        if found is None:
            return NotImplemented
        w, b = found
        places = w.place, b.place
        own: Tensor = x.root if x.dtensor is None else x.local()  # type: ignore[assignment]
        dtypes = own.dtype, w.tensor.dtype, None if bias is None else b.tensor.dtype
        key: tuple[Any, ...] = (function, places, dtypes, stride, padding, out, dilation, groups)
        if list in map(type, key):
            key = tuple([tuple(value) if type(value) is list else value for value in key])
        plans = place.plans
        call = plans.get(key, False)
        if call is False:
            arguments = numbers(stride), numbers(padding), numbers(dilation), transposed, numbers(out), groups
            call = plans[key] = _call(place, *places, dtypes, arguments)
        if call is None:
            return NotImplemented
        converts = converts_operands(own)
        if not call.alone and converts:
            return NotImplemented

        def result() -> Tensor:
            if not call.alone:
                (own_weight, take_w), (own_bias, take_b) = w.handed(), b.handed()
                return apply(Convolution, own, own_weight, own_bias, call.plan, (take_w, take_b))
            last = (out, groups, dilation) if transposed else (dilation, groups)
            given = w.root, b.root, stride, padding, *last
            return past_kernel("aten::convolution", own, function, own, *given)

        if running.chain is None or not call.windows or converts:
            return activation(result(), call.output)
        return chained_convolution(running.chain, call, x, w.root, b.root, result)

    def transposed_path(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        return convolution_path(input, weight, bias, stride, padding, dilation, groups, output_padding)

    path(function, parameters=True)(transposed_path if transposed else convolution_path)


for _dims in (1, 2, 3):
    _convolution(getattr(torch, f"conv{_dims}d"), _dims, False)
    _convolution(getattr(torch, f"conv_transpose{_dims}d"), _dims, True)


@layer("conv1d", "_conv_forward", nn.Conv1d)
@layer("conv2d", "_conv_forward", nn.Conv2d)
@layer("conv3d", "_conv_forward", nn.Conv3d)
def _convolved(convolve: Any, module: Any, x: Activation) -> Any:
    parameters = module._parameters
    if module.padding_mode != "zeros" or "weight" not in parameters or "bias" not in parameters:
        return NotImplemented
    rest = module.stride, module.padding, module.dilation, module.groups
    return convolve(x, parameters["weight"], parameters["bias"], *rest)


@path(F.pad)
def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Pads the last dims. Numbers may be negative, which crops; not all may be zero."""
    if type(input) is not Activation or input.share is not None or not input.place.is_plain:
        return NotImplemented
    if value or not any(pad) or not all(type(count) is int for count in pad):
        return NotImplemented
    place = input.place
    key = "pad", mode, tuple(pad)
    known = place.plans.get(key)
    if known is None:
        known = place.plans[key] = _plan(place, mode, tuple(pad))
    plan, to = known
    return activation(padded(input.local(), plan, mode), to)


def _plan(place: ShapedLayout, mode: str, pad: tuple[int, ...]) -> tuple[PaddingPlan, ShapedLayout]:
    """The plan, and the layout of its result. Raises what one process raises for these arguments."""
    check_padding(mode, place.shape, pad, 0)
    plan = padding_plan(place.mesh, place.placements, tuple(place.shape), mode, pad)
    return plan, place.of_shape(plan.shape)
