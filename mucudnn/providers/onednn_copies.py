"""Predicts the bytes of the copies of operands that oneDNN makes in layouts of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.devices import Host
from mucudnn.providers.onednn_columns import bytes_with_columns
from mucudnn.providers.onednn_kernels import is_direct
from mucudnn.providers.stock import BLOCK, torchs_backend

CHANNELS = 128  # Those of an input that are copied at a time for the gradient of a strided filter of one tap.


def copies_bytes(problem: ConvProblem) -> int:
    """About the bytes of copies in layouts of its own that oneDNN makes of operands, beside them; 0 for other kernels.

    Measured with torch 2.13 and AVX-512: 1-D to 3-D, with 1 to 512 channels, in float32. Weights' gradients in 3-D took
    between a third and all of it, by processor.
    """
    return _copies(problem, Host.switches())


@lru_cache(maxsize=4096)
def _copies(problem: ConvProblem, switches: tuple[object, ...]) -> int:
    """The result of `copies_bytes`, cached also by the switches on which torch's choice of a kernel depends."""
    if not torchs_backend(problem).startswith("Mkldnn"):
        return 0
    x, w, y = (math.prod(n) * problem.element_bytes for n in (problem.x_shape, problem.w_shape, problem.y_shape))
    taps, is_strided = math.prod(problem.w_shape[2:]), set(problem.stride) != {1}
    is_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not is_direct(problem, is_avx512):
        return bytes_with_columns(problem, torch.get_num_threads())
    more = w if len(problem.stride) == 3 else 0
    if more and problem.target is Role.W and not is_avx512:
        more = torch.get_num_threads() * 13 * w // 3 - w  # Each thread sums up by itself; measured with AVX2.
    if problem.formats[0] == "channels_last":
        return max(_in_channels_last(problem, x, w, y), more)
    by_blocks = problem.groups == 1 and not problem.transposed
    few = by_blocks and problem.x_shape[1] <= BLOCK // 2 and taps > 1  # These are read as they are.
    in_x, in_y = (
        _blocked(problem, shape) if by_blocks else math.prod(shape) * problem.element_bytes
        for shape in (problem.x_shape, problem.y_shape)
    )
    read = 0 if few else in_x
    is_point, sampled = is_strided and taps == 1, 0
    if is_point and problem.dims < 3:  # Each thread copies the positions of a sample that the filter meets.
        sampled = torch.get_num_threads() * x // (problem.extent * math.prod(problem.stride))
    if problem.target is Role.W:
        copies = read + in_y + sampled * min(CHANNELS, problem.x_shape[1]) // problem.x_shape[1]
        # Threads that share out the samples add up weights' gradients; if these are large, they share out channels.
        return max(copies + w * (4 * w < copies), w + more)
    if problem.target is Role.X:
        if is_strided:  # Each thread copies a sample.
            return max(2 * x, w + y + torch.get_num_threads() * y // problem.extent, w + more)
        return w + max(in_x + in_y - x, in_x, more)
    return w + max(x + sampled if is_point else max(read + in_y - y, in_y), more)


def _in_channels_last(problem: ConvProblem, x: int, w: int, y: int) -> int:
    """The bytes besides operands in channels_last, which are read and written as they are; the weights are not."""
    is_strided = set(problem.stride) != {1}
    if problem.target is Role.X:
        return 2 * w + is_strided * torch.get_num_threads() * y // problem.extent  # Each thread takes a sample.
    sampled = problem.target is Role.W and is_strided and math.prod(problem.w_shape[2:]) == 1
    return 2 * w + (problem.target is Role.W) * w + sampled * x // math.prod(problem.stride)


def _blocked(problem: ConvProblem, shape: Sequence[int]) -> int:
    """The bytes of a tensor in blocks of channels."""
    samples, channels, *space = shape
    return samples * -(-channels // BLOCK) * BLOCK * math.prod(space) * problem.element_bytes


def writes_columns(problem: ConvProblem) -> bool:
    """Whether oneDNN computes a convolution from columns that it writes out."""
    if not torchs_backend(problem).startswith("Mkldnn"):
        return False
    return not is_direct(problem, torch.backends.cpu.get_cpu_capability() == "AVX512")
