"""Predicts which of oneDNN's kernels computes a convolution: a direct one, or one that writes columns out (im2col).

The rules are those by which the kernels of oneDNN 3.12 accept shapes of float32, in short: its files
jit_avx512_common_conv_kernel.cpp and jit_avx2_conv_kernel_f32.cpp. A direct kernel computes
some neighbouring positions of a row at a time, its step. Padding, or what a filter reads beyond the image, must not
exceed a step, and the generated code must not become too large.
"""

from __future__ import annotations

from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.providers.stock import BLOCK

STEP = 28  # Positions that direct kernels for AVX-512 compute at a time at most.

STEP_OF_AVX2 = {Role.X: 7, Role.Y: 3}  # The same of AVX2: those of padding, or beyond the image.

STEP_BY_CHANNEL = 6  # Positions of padding in kernels of one filter for each channel.

REGISTERS = 31  # Registers of AVX-512 for results, and for one operand of each position.

LARGEST_FILTER = 14, 13  # Positions along the width, in direct kernels for gradients of weights: AVX-512, AVX2.

CODE = 256 << 10  # Bytes of generated code at most.

CACHE = 32 << 10  # Bytes of the first cache, which most processors have or exceed.


def is_direct(problem: ConvProblem, has_avx512: bool) -> bool:
    """Whether a direct kernel computes a convolution; else one that writes columns out."""
    target, (channels, filters) = problem.target, _of_group(problem)
    is_spread = set(problem.dilation) != {1}
    if problem.dims == 3:
        return target is not Role.W or not (is_spread and (problem.dilation[0] > 1 or not has_avx512))
    if problem.groups > 1 and channels == filters == 1:  # by channel
        if target is Role.Y:
            return problem.padding[-1] <= STEP_BY_CHANNEL
        return not is_spread and (target is Role.X or max(problem.w_shape[2:]) <= 3)
    if problem.groups > 1 and (channels % (BLOCK // 2) or filters % (BLOCK // 2)):
        return False
    if target is Role.W:
        return _is_direct_for_weights(problem, has_avx512)
    if target is Role.X and set(problem.stride) != {1}:
        return not is_spread  # There is a kernel for strides alone.
    sizes = zip(problem.windows, problem.padding, problem.padding_after, strict=True)
    if any(window.reach <= max(before, after) for window, before, after in sizes):
        return False  # Some results depend on padding alone.
    if target is Role.X:
        return _is_direct_for_input(problem, has_avx512)
    return _is_direct_for_output(problem) if has_avx512 else problem.padding[-1] <= STEP_OF_AVX2[target]


def _of_group(problem: ConvProblem) -> tuple[int, int]:
    """The channels and filters of a group."""
    return problem.w_shape[1], problem.w_shape[0] // problem.groups


def _is_direct_for_weights(problem: ConvProblem, has_avx512: bool) -> bool:
    (*heights, width), (*before_rows, before), (*after_rows, after) = (
        problem.windows,
        problem.padding,
        problem.padding_after,
    )
    if not has_avx512:
        return width.kernel <= LARGEST_FILTER[1] and set(problem.dilation) == {1}
    padding = max(before, after)
    if width.kernel > LARGEST_FILTER[0] or padding > STEP or padding >= width.reach:
        return False
    for window, above, below, rows in zip(heights, before_rows, after_rows, problem.x_shape[2:-1], strict=True):
        is_spread = window.dilation > 1 and (window.stride > 1 or window.reach > rows)
        if is_spread or max(above, below) > window.reach // 2:
            return False
    return True


def _is_direct_for_input(problem: ConvProblem, has_avx512: bool) -> bool:
    """Without strides."""
    window, before, after, row = (
        problem.windows[-1],
        problem.padding[-1],
        problem.padding_after[-1],
        problem.x_shape[-1],
    )
    left = max(0, window.reach - 1 - before)

    def right(step: int) -> int:
        return max(0, window.reach - 1 - max(0, after + row % step))

    if has_avx512:
        step, blocks = _step_for_input(problem)
        code = _code(window.kernel, BLOCK * blocks, step, left > 0, right(step) > 0)
        if max(left, right(step)) <= step and code <= CODE:
            return True
    return max(left, right(STEP_OF_AVX2[Role.X])) <= STEP_OF_AVX2[Role.X]


def _step_for_input(problem: ConvProblem) -> tuple[int, int]:
    """The positions, and the blocks of channels, that a direct kernel for an input's gradient computes at a time."""
    rows, width = (1, *problem.w_shape[2:])[-2:]
    row, row_of_result, blocks = problem.x_shape[-1], problem.y_shape[-1], -(-_of_group(problem)[0] // BLOCK)
    read = 2 * BLOCK * row * rows + BLOCK * row_of_result + 2 * rows * width * BLOCK**2
    is_cached = read * problem.element_bytes < CACHE
    is_narrow = row <= 5 or 8 < row <= 13
    takes_one = width > 3 or (width == 3 and is_cached and row_of_result > 8)
    if width != 1 and not (width == 5 and row < 8) and not (width < 5 and (is_narrow or not is_cached)):
        pairs = not takes_one and blocks % 2 == 0
        return (min(row, REGISTERS // 3), 2) if pairs else (min(row, STEP), 1)
    at_once = max(n for n in range(1, 5) if blocks % n == 0)
    return min(row, REGISTERS // (at_once + 1)), at_once


def _is_direct_for_output(problem: ConvProblem) -> bool:
    window, before, row = problem.windows[-1], problem.padding[-1], problem.y_shape[-1]
    channels, filters = _of_group(problem)
    blocks, step = 1, min(row, STEP)
    is_alone = problem.extent == 1 and (row <= STEP or channels <= 3 or (row <= 147 and filters <= 96))
    if window.kernel <= 3 and not is_alone and row > STEP:
        blocks = max(n for n in range(1, 6) if -(-filters // BLOCK) % n == 0)
        step = min(row, REGISTERS // (blocks + 1))
    after = max(0, (row - row % step - 1) * window.stride + window.reach - problem.x_shape[-1] - before)
    block = channels if channels <= 3 else BLOCK
    return max(before, after) <= step and _code(window.kernel, block * blocks, step, before > 0, after > 0) <= CODE


def _code(kernel: int, channels: int, step: int, *sides: bool) -> int:
    """Bytes of generated code at most: of the middle of a row, and of each side that differs."""
    return 15 * (1 + sum(sides)) * kernel * channels * step
