"""A convolution in a chain: computed for all positions that a rank can, without a message if these include its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from distconv.model.direct.activation import Activation
from distconv.model.direct.chains.call import Chain, spans_of
from distconv.model.direct.chains.choice import Coverage, Span, covers, of_own, reached
from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.model.direct.shares import apply
from distconv.rules.convolution import kernels, marked
from distconv.rules.convolution.plan import ConvolutionPlan
from distconv.tensors.dtensors import memory_format
from mucudnn.convolution.geometry import Window


class ConvolutionCall(NamedTuple):
    """The decisions of a convolution for given shapes."""

    plan: ConvolutionPlan
    alone: bool  # Whether torch's own function on this rank's tensors gives the result.
    output: ShapedLayout
    arguments: tuple[Any, ...]  # The arguments of `aten::convolution` after the tensors.
    windows: tuple[Window, ...]  # By span of the input; empty if the layer cannot be one of a chain.
    operations: float  # Multiplications and additions for a position of space, on the rank with most elements.


def chained_convolution(
    chain: Chain,
    layer: ConvolutionCall,
    x: Activation,
    weight: Tensor,
    bias: Tensor | None,
    alone: Callable[[], Tensor],
) -> Activation:
    """The result of a convolution; ``alone`` computes it with a halo that the layer fetches for itself."""
    inputs, outputs = spans_of(x.place), spans_of(layer.output)
    entered = chain.enter((x,), layer.output, layer.windows, True, layer.operations)
    assert entered is not None, "the layer has windows"
    (own,), coverage, number = entered
    made = reached(layer.windows, coverage, inputs, outputs)
    if coverage == of_own(inputs) or not all(map(covers, made, of_own(outputs))):
        return chain.leave(alone(), layer.output, of_own(outputs), number)
    return chain.leave(_convolved(layer, inputs, own, weight, bias, coverage, made), layer.output, made, number)


def _convolved(
    layer: ConvolutionCall,
    inputs: tuple[Span, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coverage: Coverage,
    made: Coverage,
) -> Tensor:
    """All outputs that the rank can compute. Padding is applied only at the ends of the whole tensor.

    For padding at one end only, the kernel pads both ends, and outputs that read zeros at the other end are dropped.
    That is right for stride 1; for other strides zeros are concatenated to the input.
    """
    stride, given, *rest = layer.arguments
    padding, zeros, kept = [*given], [0] * (2 * len(given)), []
    for span, window, has, makes in zip(inputs, layer.windows, coverage, made, strict=True):
        (start, stop), (first, last) = has[span.here], makes[span.here]
        before, after = window.padding if start == 0 else 0, window.padding if stop == span.extent else 0
        at = span.dim - 2
        if window.stride == 1:
            padding[at] = max(before, after)
            kept.append((span.dim, padding[at] - before, last - first))
        else:
            begin = start if start == 0 else first * window.stride - window.padding
            x = x.narrow(span.dim, begin - start, stop - begin)
            padding[at], behind = 0, 2 * (len(given) - 1 - at)
            zeros[behind : behind + 2] = before, after
    x = functional.pad(x, zeros) if any(zeros) else x
    if layer.plan.onednn and not x.is_contiguous():
        x = x.contiguous(memory_format=memory_format(x))
    arguments = (stride, padding, *rest[:-1], layer.plan.split.block.runs[0].groups)
    y: Tensor = apply(_Local, x, weight, bias, layer.plan, arguments)
    for each in kept:
        y = y.narrow(*each)
    return y


class _Local(torch.autograd.Function):
    """A convolution of this rank's tensor alone, by the kernel that would compute the whole one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan, arguments: kernels.Arguments
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan, ctx.arguments = plan, arguments
        with marked(plan, x):
            y = kernels.local_convolution(plan.onednn, x, weight, bias, arguments)
        return y.clone() if y._base is not None else y  # autograd forbids changing a view in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        plan, arguments, mask = ctx.plan, ctx.arguments, list(ctx.needs_input_grad[:3])
        with marked(plan, x):
            if torch.is_grad_enabled():
                sizes = [weight.shape[0]] if mask[2] else None
                found = torch.ops.aten.convolution_backward(grad, x, weight, sizes, *arguments, mask)
            else:
                found = *kernels.local_gradients(plan.onednn, grad, x, weight, arguments, *mask[:2]), None
                if mask[2]:
                    found = *found[:2], grad.sum([0, *range(2, grad.dim())])
        return *found, None, None
