"""Computes a convolution of volumes as a sum of convolutions of images, one for each plane of the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ALIGNMENT, ConvProblem, Role
from mucudnn.convolution.tile import Part
from mucudnn.providers.provider import Effort, Provider, compute_dtype
from mucudnn.providers.stock import columns_bytes, evened, stock_result

SLICES = "slices"


class Plane(NamedTuple):
    """A plane of the kernel, with the planes of x that it reads and the planes of y that it adds to.

    Attributes:
        tap: its place along the kernel's depth.
        x, y: the planes of x that it reads, and those of y that it adds to.
        problem: the convolution of these planes, all of them samples.
    """

    tap: int
    x: slice
    y: slice
    problem: ConvProblem


class Slices(Provider):
    """y = sum over the planes t of the kernel of conv2d(x[t], w[t]), x[t] the planes of x that t reads for each of y.

    Torch's kernels for images compute them. These serve types, groups and sizes for which its kernels for volumes are
    slow, above all kernels in groups. Gradients are sums over the same planes, or one product for each plane.
    """

    def __init__(self, scratch: Callable[[ConvProblem], int] = columns_bytes) -> None:
        """``scratch``: bytes of torch's own kernel for images that count as workspace."""
        self._scratch = scratch

    def counting(self, scratch: Callable[[ConvProblem], int]) -> Slices:
        """This provider with the scratch memory of torch's own kernel counted."""
        return Slices(scratch)

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        return (SLICES,) if problem.dims == 3 else ()

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        size, target = compute_dtype(problem).itemsize, problem.target
        # x and y with their planes as samples, copies or sums, and the weight's gradient.
        kept = math.prod(problem.x_shape) + math.prod(problem.y_shape) + math.prod(problem.w_shape)
        most = 0
        for plane in _planes(problem):
            even, flat = evened(plane.problem), plane.problem
            elements = math.prod(flat.w_shape) + math.prod(even.problem.target_shape)
            if target is not Role.X:
                elements += math.prod(flat.x_shape) + (0 if even.is_same else math.prod(even.problem.x_shape))
            if target is not Role.Y:
                elements += math.prod(flat.y_shape)
            most = max(most, size * elements + self._scratch(even.problem))
        return size * kept + most

    def effort(self, problem: ConvProblem, algorithm: str, count: int = 1) -> Effort:
        size = compute_dtype(problem).itemsize
        copies = math.prod(problem.x_shape), math.prod(problem.y_shape)
        # The planes of the kernel that read the padding alone are left out.
        operations = sum(plane.problem.flops for plane in _planes(problem))
        return Effort.of(operations, *(size * copy for copy in copies), times=count)

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        for part in parts:
            accumulate = part.write(_result(part.problem, part), accumulate)


def _result(problem: ConvProblem, given: Operands) -> torch.Tensor:
    """The result in the dtype of the computation: for x and y a view whose planes are samples in memory."""
    dtype, target = compute_dtype(problem), problem.target
    if target is Role.W:
        result = given.w.new_zeros(problem.w_shape, dtype=dtype)
    else:
        shape = problem.x_shape if target is Role.X else problem.y_shape
        result = given.w.new_zeros((shape[0], shape[2], shape[1], *shape[3:]), dtype=dtype)
        if given.bias is not None:
            result += given.bias.view(-1, 1, 1)
    x, y = (
        None if role is target else tensor.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)
        for role, tensor in ((Role.X, given.x), (Role.Y, given.y))
    )
    for plane in _planes(problem):
        even = evened(plane.problem)
        shape = plane.problem.target_shape
        outline = result.view(-1)[: math.prod(shape)].view(shape)  # of which torch reads the shape and the strides
        operands = Operands(
            outline if x is None else x[:, plane.x].flatten(0, 1),
            given.w[:, :, plane.tap].to(dtype, memory_format=torch.contiguous_format),
            outline if y is None else y[:, plane.y].flatten(0, 1),
        )
        found = even.result(stock_result(even.problem, even.operands(operands)))
        if target is Role.W:
            result[:, :, plane.tap] = found
        else:
            summed = result[:, plane.x if target is Role.X else plane.y]
            summed += found.unflatten(0, summed.shape[:2])
        del operands, found
    return result if target is Role.W else result.transpose(1, 2)


@lru_cache(maxsize=1024)
def _planes(problem: ConvProblem) -> tuple[Plane, ...]:
    """The planes of the kernel that do not read padding alone."""
    return tuple(_found(problem))


def _found(problem: ConvProblem) -> Iterator[Plane]:
    window, inputs, outputs = problem.windows[0], problem.x_shape[2], problem.y_shape[2]
    for tap in range(problem.w_shape[2]):
        # Output y reads input y * stride + offset.
        offset = tap * window.dilation - problem.padding[0]
        first = max(0, -(offset // window.stride))
        count = min(outputs, (inputs - 1 - offset) // window.stride + 1) - first
        if count <= 0:
            continue
        start = first * window.stride + offset
        samples = problem.extent * count
        flat = replace(
            problem,
            x_shape=(samples, problem.x_shape[1], *problem.x_shape[3:]),
            w_shape=(*problem.w_shape[:2], *problem.w_shape[3:]),
            y_shape=(samples, problem.y_shape[1], *problem.y_shape[3:]),
            stride=problem.stride[1:],
            padding=problem.padding[1:],
            dilation=problem.dilation[1:],
            dtype=str(compute_dtype(problem)).removeprefix("torch."),
            formats=("contiguous",) * 3,
            alignment=ALIGNMENT,
        )
        x = slice(start, start + (count - 1) * window.stride + 1, window.stride)
        yield Plane(tap, x, slice(first, first + count), flat)
