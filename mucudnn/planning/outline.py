"""Predicts the memory format of the result of torch's own kernel, and its columns, without calling it on the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mucudnn.convolution.call import Call, torch_format
from mucudnn.providers import stock_result
from mucudnn.providers.stock import torchs_backend


def outline(call: Call) -> torch.Tensor | None:
    """An empty tensor of the shape and strides of a call's result; `None` where these are not known.

    Torch's own kernel computes the smallest convolution of the same kind, of two samples and two outputs along each
    spatial dim, and the memory format of its result is taken.
    """
    problem = call.problem()
    if problem is None:
        return None
    samples, windows = min(2, problem.extent), problem.windows
    reached = (max(2, window.stride + window.reach - 2 * window.padding) for window in windows)
    inputs = [min(extent, most) for extent, most in zip(problem.x_shape[2:], reached, strict=True)]
    outputs = [window.outputs(extent) for window, extent in zip(windows, inputs, strict=True)]
    x_shape, y_shape = (samples, problem.x_shape[1], *inputs), (samples, problem.y_shape[1], *outputs)
    least = replace(problem, x_shape=x_shape, y_shape=y_shape)
    if torchs_backend(least) != torchs_backend(problem):
        return None
    # The weight is as large. Strides decide: a tensor of a single channel is in two memory formats, others in none.
    operands = call.operands()
    computed = stock_result(least, replace(operands, x=_corner(operands.x, x_shape), y=_corner(operands.y, y_shape)))
    for name in ("contiguous", "channels_last") if problem.dims > 1 else ("contiguous",):
        shapes = least.target_shape, problem.target_shape
        small, whole = (
            torch.empty(shape, dtype=computed.dtype, memory_format=torch_format(name, len(shape))) for shape in shapes
        )
        if small.stride() == computed.stride():
            return whole
    return None


def _corner(tensor: Any, shape: Sequence[int]) -> Any:
    """The first elements of a tensor along each dim; None for one that is still to be computed."""
    return None if tensor is None else tensor[tuple(slice(extent) for extent in shape)]


def may_exceed(looks: tuple[Any, ...], limit: float) -> bool:
    """Whether the columns of torch's own kernel may exceed a limit, by the shapes alone, in about a microsecond.

    ``looks``: the shim's key of a convolution: devices; of one or two activations, and of the weight, the shape,
    strides and type; then stride, padding, dilation, transposed, output padding and groups; two more.
    """
    if limit == math.inf:
        return False
    *_, source, _, _, weight, _, dtype, (_, padding, *_, groups), _, _ = looks
    places = source[0] * math.prod(extent + 2 * pad for extent, pad in zip(source[2:], padding, strict=False))
    return bool(math.prod(weight[1:]) * groups * places * dtype.itemsize > limit)
