"""Predicts the memory of oneDNN's convolutions from columns (im2col) on a processor.

By gemm_convolution_utils.cpp of oneDNN 3.12, in short; what surrounds its columns was counted.
"""

from __future__ import annotations

import math

from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.providers.stock import BLOCK

COLUMNS = 1 << 19  # Bytes of columns of each thread at a time, for outputs.

PACKED = 128, 384  # Filters of which matrix products copy dL/dy, at least and at most.


def bytes_with_columns(problem: ConvProblem, threads: int) -> int:
    """The bytes of a kernel that writes columns out, and of copies of its result; measured with one and two threads."""
    result = math.prod(problem.target_shape) * problem.element_bytes
    if problem.target is Role.Y:
        return result + threads * COLUMNS * (problem.w_shape[0] < 4 * BLOCK)
    columns = _columns_at_once(problem, threads)
    if problem.target is Role.W:
        return columns + _parallel_samples(problem, threads) * 17 * result // 4
    filters = problem.w_shape[0] // problem.groups
    rows = _parallel_samples(problem, threads) * math.prod(problem.y_shape[2:]) * (filters > 2 * BLOCK)
    packed = rows * min(max(filters, PACKED[0]), PACKED[1]) * problem.element_bytes
    return max(result, columns + packed)


def _columns_at_once(problem: ConvProblem, threads: int) -> int:
    """The bytes of columns that a kernel writes out at a time, by all of its threads.

    It takes those of a sample for each thread, unless its scratch memory would exceed a limit: then a share of that.
    """
    positions, taps = _positions(problem), math.prod(problem.w_shape[1:])
    x, w, y = (math.prod(n) * problem.element_bytes for n in (problem.x_shape, problem.w_shape, problem.y_shape))
    limit, one = min(1 << 30, 15 * threads * (x + w + y)), taps * problem.element_bytes
    parallel = _parallel_samples(problem, threads)
    left = limit - parallel * w * (problem.target is Role.W)
    if parallel * positions * one > left:
        share = 0.05 if problem.target is Role.W else 0.1
        positions = max(BLOCK, int(share * (left // (parallel * one))))
    return parallel * positions * one


def _parallel_samples(problem: ConvProblem, threads: int) -> int:
    """The samples that a kernel with columns computes at a time: one for each thread, or one in all of them."""
    positions = _positions(problem)
    if problem.extent == 1 and problem.groups <= 2:
        return 1
    if problem.target is Role.W:
        return threads if positions < 256 * threads else 1
    return threads if positions < 512 * threads or math.prod(problem.w_shape[2:]) < 64 else 1


def _positions(problem: ConvProblem) -> int:
    """The positions of a result, of one depth in 3-D."""
    return math.prod(problem.y_shape[2:][-2:])
