"""Torch's own kernel, called below the dispatcher, and the same kernel as an algorithm for parts of a division.

Torch's kernels take the same padding at both ends of a dim. The ends may differ by what a stride or an output padding
leaves over; any other difference becomes rows of x. The scratch memory that they take on a processor follows from
formulas: im2col's columns, oneDNN's copies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any, Self

import torch
from torch.nn import functional

from mucudnn.convolution.call import Call, Operands, torch_format
from mucudnn.convolution.problem import ConvProblem, Direction, Role, Shape
from mucudnn.convolution.tile import Part
from mucudnn.devices import SERVED, Host
from mucudnn.providers.provider import Provider

STOCK = "stock"  # The name of the algorithm that is torch's own kernel.


@cache
def stock_kernel(operator: str, dispatch_key: str) -> Callable[..., Any]:
    """The kernel of `aten::convolution` or `aten::convolution_backward`, taken before the shim installs itself.

    Other threads of Python run while torch's own kernel computes: the dispatcher calls it, by its entry for tensors of
    no device, where the kernel for all devices is registered. If another library has registered a kernel before
    torch's, that kernel is called directly, with Python's lock taken.
    """
    if not is_torchs_own(operator, dispatch_key):
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))
        return partial(torch.library.get_kernel(f"aten::{operator}", dispatch_key).call_boxed, keys)
    no_device = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    kernel = partial(getattr(torch.ops.aten, operator).default._handle.redispatch_boxed, no_device)
    return SERVED[dispatch_key].on_its_device(kernel)


def is_torchs_own(operator: str, dispatch_key: str) -> bool:
    """Whether the present kernel of `aten::convolution` or `aten::convolution_backward` is torch's own."""
    kernel = torch.library.get_kernel(f"aten::{operator}", dispatch_key)
    return re.search(r"ATen.Register\w+\.cpp", repr(kernel)) is not None  # the file that registered it


def _computed(
    direction: Direction,
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    produced: torch.Tensor | None,
    geometry: tuple[Any, ...],
) -> torch.Tensor:
    dispatch_key = weight.device.type.upper()
    if direction is Direction.FORWARD:
        result: torch.Tensor = stock_kernel("convolution", dispatch_key)(source, weight, bias, *geometry)
        return result
    mask = [direction is Direction.BACKWARD_DATA, direction is Direction.BACKWARD_FILTER, False]
    kernel = stock_kernel("convolution_backward", dispatch_key)
    result = kernel(produced, source, weight, None, *geometry, mask)[0 if mask[0] else 1]
    return result


def stock_result(problem: ConvProblem, operands: Operands) -> torch.Tensor:
    """The result of torch's own kernel for the problem, in torch's own layout.

    The target is not touched: that of a gradient is read for its shape and layout only.
    """
    source, produced = (operands.y, operands.x) if problem.transposed else (operands.x, operands.y)
    return _computed(problem.direction, source, operands.w, operands.bias, produced, problem.arguments)


def stock_call(call: Call) -> torch.Tensor:
    """The result of torch's own kernel for a call, whose problem need not be known."""
    if call.by_torch is not None:
        return call.by_torch()
    return _computed(call.direction, call.input, call.weight, call.bias, call.grad_output, call.geometry)


def torchs_backend(problem: ConvProblem) -> str:
    """The kernel that torch, with its present switches and threads, takes on a processor."""
    (source, weight), (stride, padding, dilation, *rest) = (problem.input_shape, problem.w_shape), problem.arguments
    if problem.dims == 1:  # Torch takes what it takes for images of one row, but would first allocate the input.
        source, weight = ((*shape[:2], 1, *shape[2:]) for shape in (source, weight))
        stride, padding, dilation, rest[1] = (1, *stride), (0, *padding), (1, *dilation), (0, *problem.output_padding)
    one = torch.empty(1, dtype=getattr(torch, problem.dtype))  # Shapes without memory: one element, expanded.
    arguments = stride, padding, dilation, *rest, None
    name: str = torch._C._select_conv_backend(one.expand(source), one.expand(weight), None, *arguments).name
    return "MkldnnTranspose" if name == "???" else name  # the one that torch's table of names lacks


class Stock(Provider):
    """Torch's own kernel on parts.

    Undivided, its workspace counts as 0: the program would need the scratch memory that torch takes without mucudnn,
    too. A part needs memory for its result, which is then copied or added to its place, and for copies that the whole
    would not need: of an input whose padding differs at its two ends, and of operands that torch makes contiguous.
    """

    is_outlined = False
    """Whether torch is shown the target of a gradient in its format in the problem, wherever the result goes. Of that
    target torch reads the shape and the layout; in another layout than the other tensors it would copy it, or them."""

    def __init__(self, scratch: Callable[[ConvProblem], int] | None = None) -> None:
        """``scratch``: bytes of that kernel that count as workspace, too."""
        self._scratch = scratch

    def counting(self, scratch: Callable[[ConvProblem], int]) -> Self:
        """This provider with the scratch memory of torch's own kernel counted."""
        return type(self)(scratch)

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        # A half-type weight gradient would be rounded once per part.
        return () if problem.is_half and problem.target is Role.W else (STOCK,)

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        even = evened(problem)
        elements = math.prod(even.problem.target_shape)
        x_format, _, y_format = problem.formats
        if problem.target is not Role.X and (x_format == "strided" or not even.is_same):
            elements += math.prod(even.problem.x_shape)
        if problem.target is not Role.Y and y_format == "strided":
            elements += math.prod(problem.y_shape)
        return elements * problem.element_bytes + (0 if self._scratch is None else self._scratch(even.problem))

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        for part in parts:
            even = evened(part.problem)
            given = _outlined(part.problem, part) if self.is_outlined else part
            if even.is_same:
                accumulate = part.write(stock_result(even.problem, given), accumulate)
            else:
                accumulate = part.write(even.result(stock_result(even.problem, even.operands(given))), accumulate)


def _outlined(problem: ConvProblem, operands: Operands) -> Operands:
    """The operands; the target of a gradient gets the strides of its format in the problem.

    ``operands``: their target is contiguous in one format or the other.
    """
    if problem.direction is Direction.FORWARD:
        return operands
    target, name = operands.target(problem), dict(zip(Role, problem.formats, strict=True))[problem.target]
    memory_format = torch_format(name, target.dim())
    # Always, since torch decides by the strides: a weight of one element is contiguous and channels-last at once.
    strides = torch.empty(target.shape, device="meta", memory_format=memory_format).stride()
    return replace(operands, **{str(problem.target): target.as_strided(target.shape, strides)})


@dataclass(frozen=True)
class Evened:
    """A problem as torch can compute it.

    Attributes:
        problem: the same convolution on an x with some of its padding made rows of its own.
        before, after: those rows at the two ends of each spatial dim.
    """

    problem: ConvProblem
    before: Shape
    after: Shape

    @cached_property
    def is_same(self) -> bool:
        """Whether torch takes the problem as it is."""
        return not any(self.before + self.after)

    def operands(self, operands: Operands) -> Operands:
        """The operands with zeros in place of the padding: x is copied where it is read and has such rows."""
        if self.is_same:
            return operands
        if self.problem.target is Role.X:
            # Read for its shape and type only.
            shape = self.problem.x_shape
            return replace(operands, x=operands.y.as_strided(shape, (0,) * len(shape)))
        ends = [n for pair in zip(reversed(self.before), reversed(self.after), strict=True) for n in pair]
        return replace(operands, x=functional.pad(operands.x, ends))

    def result(self, result: torch.Tensor) -> torch.Tensor:
        """The wanted part of what torch computes, a view."""
        if self.problem.target is Role.X:
            for dim, (before, after) in enumerate(zip(self.before, self.after, strict=True), start=2):
                result = result.narrow(dim, before, result.shape[dim] - before - after)
        return result


@lru_cache(maxsize=4096)
def evened(problem: ConvProblem) -> Evened:
    """The problem with padding that torch takes."""
    before, after = [], []
    for window, start, stop in zip(problem.windows, problem.padding, problem.padding_after, strict=True):
        spare = max(window.stride, window.dilation) if problem.transposed else window.stride
        fits = 0 <= start - stop < spare
        before.append(0 if fits else max(0, start - max(stop, 0)))
        after.append(0 if fits else max(0, stop - start))
    rows = zip(problem.x_shape[2:], before, after, strict=True)
    same = replace(
        problem,
        x_shape=(*problem.x_shape[:2], *(n + b + a for n, b, a in rows)),
        padding=tuple(p - b for p, b in zip(problem.padding, before, strict=True)),
    )
    return Evened(same, tuple(before), tuple(after))


BLOCK = 16  # Channels in a block of oneDNN's layouts, at most.


def columns_bytes(problem: ConvProblem) -> int:
    """About the bytes of columns that torch's kernel on a processor writes out, and of copies of groups; 0 for kernels
    that write none out.

    ``problem``: with padding that torch takes as it is.
    """
    return _bytes(problem, Host.switches())


@lru_cache(maxsize=4096)
def _bytes(problem: ConvProblem, switches: tuple[object, ...]) -> int:
    """The result of `columns_bytes`, cached also by the switches on which torch's choice of a kernel depends."""
    taps = math.prod(problem.w_shape[2:])
    is_view = taps == 1 and set(problem.stride) == {1} and not any(problem.padding)
    one = math.prod(problem.w_shape[1:]) * problem.groups * math.prod(problem.y_shape[2:]) * problem.element_bytes
    whole, groups = problem.extent * one, problem.groups
    if is_view:
        return 0
    kind = torchs_backend(problem)
    if kind == "Slow2d":  # group after group
        copies = math.prod(problem.x_shape) + math.prod(problem.y_shape) if groups > 1 else 0
        # For the input's gradient each thread has columns of one sample, which torch's allocator does not see.
        at_once = min(problem.extent, torch.get_num_threads()) if problem.target is Role.X else problem.extent
        return copies * problem.element_bytes + at_once * one // groups
    if kind == "Slow3d" or (kind == "SlowTranspose2d" and problem.target is Role.X):
        return whole
    return one if kind in ("SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d") else 0
