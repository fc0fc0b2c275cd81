"""Convolution as one matrix product over explicitly copied windows (im2col)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Role, Shape
from mucudnn.convolution.tile import Part
from mucudnn.providers.provider import Effort, Provider, compute_dtype

GEMM = "gemm"

MAX_TAPS = 1024
"""Kernels of more elements are not offered: adding the columns back takes one pass over the data per element."""

MOST_SUMS, SMALL = 8, 4096
"""A small matrix of weight gradients is added up in at most so many sums; and the elements up to which it is small."""


class Gemm(Provider):
    """im2col and a matrix product per group: columns (C/g · taps, N · outputs), copied out of a padded input.

    The columns repeat every input once per tap: the workspace grows with the batch and with the kernel.
    """

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        return (GEMM,) if math.prod(problem.w_shape[2:]) <= MAX_TAPS else ()

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        size = compute_dtype(problem).itemsize
        padded = math.prod(problem.x_shape[:2]) * math.prod(_padded(problem))
        pixels = problem.extent * math.prod(problem.y_shape[2:])
        columns = problem.groups * math.prod(problem.w_shape[1:]) * pixels
        rows = problem.w_shape[0] * pixels
        weight = math.prod(problem.w_shape)
        # The steps of `launch`, each with what is alive during it; half types are widened first. The weight as a matrix
        # is a copy of these, and of channels-last weights: a problem does not say which format its weight has.
        widened_x = math.prod(problem.x_shape) if problem.is_half else 0
        windows = max(padded, columns)  # without padding or overlap the columns are a view of the padded input
        steps = {
            Role.Y: (widened_x + padded, padded + columns, weight + windows + rows),
            Role.X: (weight + rows + columns, columns + padded),
            Role.W: (widened_x + padded, padded + columns, windows + rows + weight),
        }[problem.target]
        return size * max(steps)

    def effort(self, problem: ConvProblem, algorithm: str, count: int = 1) -> Effort:
        padded = math.prod(problem.x_shape[:2]) * math.prod(_padded(problem))
        pixels = problem.extent * math.prod(problem.y_shape[2:])
        taps = math.prod(problem.w_shape[2:])
        columns = problem.groups * math.prod(problem.w_shape[1:]) * pixels if taps > 1 else 0
        tensors = padded, columns, problem.w_shape[0] * pixels
        size = compute_dtype(problem).itemsize
        return Effort.of(problem.flops, *(size * elements for elements in tensors), times=count)

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        for part in parts:
            problem, operands = part.problem, part.operands
            if problem.target is Role.Y:
                _forward(problem, operands)
            elif problem.target is Role.X:
                _backward_data(problem, operands)
            else:
                _backward_filter(problem, operands, accumulate)
                accumulate = True


def _forward(problem: ConvProblem, part: Operands) -> None:
    columns = _columns(problem, part.x)
    rows = torch.bmm(_matrix(problem, part.w), columns)
    if part.bias is not None:
        rows += part.bias.view(problem.groups, -1, 1)
    _image(problem, part.y).copy_(rows.view(problem.groups, -1, part.y.shape[0], *problem.y_shape[2:]))


def _backward_data(problem: ConvProblem, part: Operands) -> None:
    columns = _product(_matrix(problem, part.w).transpose(1, 2), _rows(problem, part.y))
    padded = _add_windows(problem, columns, part.x.shape[0])
    del columns
    places: tuple[Any, ...] = tuple(slice(p, p + n) for p, n in zip(problem.padding, problem.x_shape[2:], strict=True))
    inner = padded[(..., *places)]
    if part.bias is not None:
        inner += part.bias.view(-1, *(1,) * problem.dims)
    part.x.copy_(inner)


def _backward_filter(problem: ConvProblem, part: Operands, accumulate: bool) -> None:
    columns = _columns(problem, part.x)
    gradient = _sum_of_products(_rows(problem, part.y), columns.transpose(1, 2), part.x.shape[0])
    gradient = gradient.view(problem.w_shape)
    if accumulate:
        part.w.add_(gradient)
    else:
        part.w.copy_(gradient)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.bmm, whose operands are freed at its end: no caller's variable refers to them."""
    return torch.bmm(a, b)


def _sum_of_products(rows: torch.Tensor, columns: torch.Tensor, extent: int) -> torch.Tensor:
    """bmm of (groups, F/g, N · outputs) and (groups, N · outputs, C/g · taps); for small results in several sums.

    A matrix product adds up in blocks where its result is large, and one number after the other where it is small. Over
    all samples, that would round as often as there are numbers, and be several times as far off as torch's own kernel,
    which adds up one sum for each sample.
    """
    count = min(extent, MOST_SUMS) if rows.shape[1] * columns.shape[2] <= SMALL else 1
    ends = [rows.shape[2] * number // count for number in range(count + 1)]
    result = torch.bmm(rows[..., : ends[1]], columns[:, : ends[1]])
    for begin, end in itertools.pairwise(ends[1:]):
        result.baddbmm_(rows[..., begin:end], columns[:, begin:end])
    return result


def _padded(problem: ConvProblem) -> Shape:
    """Spatial extents of the padded input, rows that are not read among them."""
    ends = zip(problem.x_shape[2:], problem.padding, problem.padding_after, strict=True)
    return tuple(n + before + max(after, 0) for n, before, after in ends)


def _image(problem: ConvProblem, y: torch.Tensor) -> torch.Tensor:
    """y as a view (groups, F/g, N, *outputs)."""
    return y.unflatten(1, (problem.groups, -1)).movedim(0, 2)


def _rows(problem: ConvProblem, y: torch.Tensor) -> torch.Tensor:
    """y as matrices (groups, F/g, N · outputs), copied."""
    rows = _image(problem, y).to(compute_dtype(problem), copy=True, memory_format=torch.contiguous_format)
    return rows.flatten(2)


def _matrix(problem: ConvProblem, w: torch.Tensor) -> torch.Tensor:
    """w as matrices (groups, F/g, C/g · taps)."""
    # Widened and put in order by one copy: a second one, of channels-last weights, would not be declared.
    matrix = w.to(compute_dtype(problem), memory_format=torch.contiguous_format)
    return matrix.reshape(problem.groups, -1, math.prod(problem.w_shape[1:]))


def _columns(problem: ConvProblem, x: torch.Tensor) -> torch.Tensor:
    """The windows of x as matrices (groups, C/g · taps, N · outputs)."""
    pairs = zip(reversed(problem.padding), reversed(problem.padding_after), strict=True)
    padded = functional.pad(x.to(compute_dtype(problem)), [max(n, 0) for pair in pairs for n in pair])
    padded = padded.unflatten(1, (problem.groups, -1))
    for dim, (window, outputs) in enumerate(zip(problem.windows, problem.y_shape[2:], strict=True), start=3):
        # Each unfold turns a spatial dim into (outputs) and appends the taps it reads, the dilated ones picked out.
        # A transposed convolution's output padding may leave room for more outputs than there are.
        padded = padded.unfold(dim, window.reach, window.stride).narrow(dim, 0, outputs)[..., :: window.dilation]
    dims = problem.dims
    windows = padded.permute(1, 2, *range(3 + dims, 3 + 2 * dims), 0, *range(3, 3 + dims))
    columns = windows.reshape(problem.groups, math.prod(problem.w_shape[1:]), -1)
    # Windows that overlap, or have gaps, may be a view that a matrix product would copy, the padded input beside it.
    return columns if _are_matrices(columns) else columns.contiguous()


def _are_matrices(x: torch.Tensor) -> bool:
    """Whether a matrix product reads each matrix of x, or its transpose, where it is."""
    (_, rows, columns), (_, down, along) = x.shape, x.stride()
    return (along == 1 and (rows == 1 or down >= columns)) or (down == 1 and (columns == 1 or along >= rows))


def _add_windows(problem: ConvProblem, columns: torch.Tensor, extent: int) -> torch.Tensor:
    """The adjoint of `_columns`, up to the padding: columns added up where they came from, (N, C, *padded)."""
    columns = columns.view(problem.groups * problem.w_shape[1], *problem.w_shape[2:], extent, *problem.y_shape[2:])
    padded = columns.new_zeros(extent, problem.x_shape[1], *_padded(problem))
    for tap in itertools.product(*map(range, problem.w_shape[2:])):
        places: tuple[Any, ...] = tuple(
            slice(t * window.dilation, t * window.dilation + (outputs - 1) * window.stride + 1, window.stride)
            for t, window, outputs in zip(tap, problem.windows, problem.y_shape[2:], strict=True)
        )
        column: tuple[Any, ...] = (slice(None), *tap)
        padded[(..., *places)] += columns[column].movedim(0, 1)
    return padded
