"""Computes a convolution by torch's own kernel on copies in the other memory format, and copies the result back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from mucudnn.convolution.call import torch_format
from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.convolution.tile import Part
from mucudnn.providers.gemm import SMALL
from mucudnn.providers.onednn import is_inner
from mucudnn.providers.provider import Effort
from mucudnn.providers.stock import Stock, evened, torchs_backend

CHANNELS_LAST, CONTIGUOUS = "channels_last", "contiguous"

OTHER = {CONTIGUOUS: CHANNELS_LAST, CHANNELS_LAST: CONTIGUOUS}
"""The memory format into which tensors of the other one are copied."""

COLUMNS = "Slow2d"
PLAIN = COLUMNS, "SlowDilated2d", "SlowTranspose2d"
"""Torch's own kernels that compute in either format. Those for volumes copy channels-last tensors first."""


class Layout(Stock):
    """Torch's own kernel in the other memory format, on micro-batches.

    "stock@channels_last" computes copies of contiguous tensors, "stock@contiguous" copies of channels-last ones. The
    weight is copied once for all parts. The workspace is that of the copies beside the kernel's own.
    """

    is_outlined = True

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        there = converted(problem)
        if there is None or not in_torch(there):
            return ()
        return tuple(f"{name}@{there.formats[0]}" for name in super().algorithms(there))

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        read = (getattr(problem, f"{role}_shape") for role in Role if role is not problem.target)
        copies = problem.element_bytes * sum(map(math.prod, read))
        return copies + super().workspace(_there(problem), algorithm)

    def effort(self, problem: ConvProblem, algorithm: str, count: int = 1) -> Effort:
        copies = (math.prod(getattr(problem, f"{role}_shape")) for role in (Role.X, Role.Y))
        return Effort.of(0, *(problem.element_bytes * copy for copy in copies), times=count)

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        first = parts[0]
        name, w = _there(first.problem).formats[0], first.w
        if first.problem.target is not Role.W:
            w = _copied(w, name)
        for part in parts:
            there = _there(part.problem)
            super().launch(algorithm, [_copies(there, part, w)], accumulate)
            accumulate = there.target is Role.W


def converted(problem: ConvProblem) -> ConvProblem | None:
    """The problem on copies in the other memory format; `None` where there is none, or no use in one.

    Without a second channel, or a second place, the formats are the same. Padding that torch does not take as it is
    would need copies of its own.
    """
    x, _, y = problem.formats
    if problem.dims == 1 or x != y or x not in OTHER or not evened(problem).is_same:
        return None
    if any(shape[1] == 1 or math.prod(shape[2:]) == 1 for shape in (problem.x_shape, problem.y_shape)):
        return None
    return _there(problem)


def in_torch(problem: ConvProblem) -> bool:
    """Whether torch's own kernel may be faster on copies in the problem's format, and is right there.

    oneDNN's kernels for groups are, in channels last: above all for gradients. In other cases it copies tensors into
    its own blocked layout, so that nothing is gained. With strides, dilations, or a kernel that spans the whole
    image it has given wrong results in channels last, and written beyond its memory (torch 2.13). Torch's own kernels
    for images may be several times faster in either format, by direction, groups and type.
    """
    is_last = problem.formats[0] == CHANNELS_LAST
    if problem.dims == 2 and (backend := torchs_backend(problem)) in PLAIN:
        return (backend != COLUMNS or _gains(problem, is_last)) and not (is_last and _is_rough(problem))
    is_grouped = problem.groups > 1 and problem.dtype == "float32" and not problem.transposed
    return is_last and is_grouped and is_inner(problem) and torchs_backend(problem) == "Mkldnn"


def _gains(problem: ConvProblem, is_last: bool) -> bool:
    """Whether torch's kernel that multiplies columns may be faster in channels last, or else in contiguous tensors.

    Kernels of one element need no columns: they may be only for half types or groups, and only contiguous.
    """
    is_one_tap = math.prod(problem.w_shape[2:]) == 1
    if is_last:
        return not is_one_tap and (problem.is_half or max(problem.stride) > 1)
    return problem.is_half or problem.groups > 1 or not is_one_tap


def _is_rough(problem: ConvProblem) -> bool:
    """Whether a weight's gradient is a small matrix for each group, so that each element is one long sum."""
    return problem.target is Role.W and math.prod(problem.w_shape) <= SMALL * problem.groups


@lru_cache(maxsize=4096)
def _there(problem: ConvProblem) -> ConvProblem:
    """The problem with all tensors in the other format."""
    name = OTHER[problem.formats[0]]
    return replace(problem, formats=(name, name, name))


def _copies(there: ConvProblem, given: Part, w: torch.Tensor) -> Part:
    """The part in the other format, with the tensors that are read copied; the target is not copied.

    ``w``: the weight, already copied where it is read.
    """
    name, target = there.formats[0], there.target
    x = given.x if target is Role.X else _copied(given.x, name)
    y = given.y if target is Role.Y else _copied(given.y, name)
    return Part(x, w, y, given.bias, problem=there, kept={})


def _copied(tensor: torch.Tensor, name: str) -> torch.Tensor:
    # `contiguous` would not copy: for torch, a tensor with one channel is contiguous and channels-last at once.
    return torch.empty_like(tensor, memory_format=torch_format(name, tensor.dim())).copy_(tensor)
