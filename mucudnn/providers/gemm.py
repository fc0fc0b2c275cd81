"""Convolution as one matrix product over explicitly copied windows (im2col)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
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
        dtype = compute_dtype(parts[0].problem)
        for part in parts:
            if part.problem.target is Role.Y:
                _forward(part.problem, part, dtype)
            elif part.problem.target is Role.X:
                _backward_data(part.problem, part, dtype)
            else:
                accumulate = part.write(_backward_filter(part.problem, part, dtype), accumulate)


def _forward(problem: ConvProblem, part: Operands, dtype: torch.dtype) -> None:
    columns = _columns(problem, part.x, dtype)
    rows = torch.bmm(_matrix(problem, part.w, dtype), columns)
    if part.bias is not None:
        rows += part.bias.view(problem.groups, -1, 1)
    _image(problem, part.y).copy_(rows.view(problem.groups, -1, part.y.shape[0], *problem.y_shape[2:]))


def _backward_data(problem: ConvProblem, part: Operands, dtype: torch.dtype) -> None:
    columns = _product(_matrix(problem, part.w, dtype).transpose(1, 2), _rows(problem, part.y, dtype))
    padded = _add_windows(problem, columns, part.x.shape[0])
    del columns
    inner = padded[_inside(problem)]
    if part.bias is not None:
        inner += part.bias.view(-1, *(1,) * problem.dims)
    part.x.copy_(inner)


def _backward_filter(problem: ConvProblem, part: Operands, dtype: torch.dtype) -> torch.Tensor:
    columns = _columns(problem, part.x, dtype)
    gradient = _sum_of_products(_rows(problem, part.y, dtype), columns.transpose(1, 2), part.x.shape[0])
    return gradient.view(problem.w_shape)


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


@lru_cache(maxsize=4096)
def _padded(problem: ConvProblem) -> Shape:
    """Spatial extents of the padded input, rows that are not read among them."""
    ends = zip(problem.x_shape[2:], problem.padding, problem.padding_after, strict=True)
    return tuple(n + before + max(after, 0) for n, before, after in ends)


@lru_cache(maxsize=4096)
def _inside(problem: ConvProblem) -> tuple[Any, ...]:
    """The index of the input in the padded one."""
    return ..., *(slice(p, p + n) for p, n in zip(problem.padding, problem.x_shape[2:], strict=True))


@lru_cache(maxsize=256)  # of many elements where kernels are large
def _taps(problem: ConvProblem) -> Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """The elements of the kernel, each as its index in columns and that of the padded input's places it reads."""
    along = [
        [
            slice(t, t + (outputs - 1) * window.stride + 1, window.stride)
            for t in range(0, window.reach, window.dilation)
        ]
        for window, outputs in zip(problem.windows, problem.y_shape[2:], strict=True)
    ]
    taps = itertools.product(*map(range, problem.w_shape[2:]))
    return [((slice(None), *tap), (..., *places)) for tap, places in zip(taps, itertools.product(*along), strict=True)]


def _image(problem: ConvProblem, y: torch.Tensor) -> torch.Tensor:
    """y as a view (groups, F/g, N, *outputs)."""
    return y.unflatten(1, (problem.groups, -1)).movedim(0, 2)


def _rows(problem: ConvProblem, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y as matrices (groups, F/g, N · outputs), copied."""
    rows = _image(problem, y).to(dtype, copy=True, memory_format=torch.contiguous_format)
    return rows.flatten(2)


def _matrix(problem: ConvProblem, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """w as matrices (groups, F/g, C/g · taps)."""
    # Widened and put in order by one copy: a second one, of channels-last weights, would not be declared.
    matrix = w.to(dtype, memory_format=torch.contiguous_format)
    return matrix.reshape(problem.groups, -1, math.prod(problem.w_shape[1:]))


def _columns(problem: ConvProblem, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The windows of x as matrices (groups, C/g · taps, N · outputs)."""
    pairs = zip(reversed(problem.padding), reversed(problem.padding_after), strict=True)
    padded = functional.pad(x.to(dtype), [max(n, 0) for pair in pairs for n in pair])
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
    for column, places in _taps(problem):
        padded[places] += columns[column].movedim(0, 1)
    return padded
