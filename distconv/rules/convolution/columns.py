"""How many channels of x a rank's backward takes at a time, where oneDNN writes out columns of all of them.

For gradients of filters that reach far beyond an image, as those of large dilations do, oneDNN writes out the operands
of all products for each channel. The gradients of some channels need the columns of these alone: that takes no longer,
as they stay in the processor's caches, and a small part of the memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distconv.rules.convolution.strips import problem_of
from distconv.transfer.tracing import planned
from mucudnn.convolution.problem import Direction, Shape
from mucudnn.providers.onednn_copies import writes_columns
from mucudnn.providers.stock import BLOCK, evened

AT_ONCE = 8 << 20
"""Bytes of columns of one sample that are written out at once, unless those of `FEWEST` channels are more."""

FEWEST = 4 * BLOCK  # Channels: products of fewer would be slower.


def channels_at_once(grad: Tensor, x: Tensor, w: Tensor, arguments: Any) -> int:
    """The channels of x whose gradients, and those of their weights, are to be computed at a time: all, or fewer.

    ``arguments``: those of `aten::convolution`. Transposed convolutions and groups are left whole.
    """
    channels = x.shape[1]
    columns = math.prod(w.shape[1:]) * math.prod(grad.shape[2:]) * x.element_size()
    transposed, groups = arguments[3], arguments[5]
    if columns <= AT_ONCE or channels <= FEWEST or transposed or groups > 1 or x.dtype is not torch.float32:
        return channels
    key = (*map(tuple, arguments[:3]), False, (), 1)
    if not _writes_columns(tuple(x.shape), tuple(w.shape), key, torch.get_num_threads()):
        return channels
    return min(channels, max(FEWEST, channels * AT_ONCE // columns // BLOCK * BLOCK))


@planned(4096)
def _writes_columns(x: Shape, w: Shape, arguments: Any, _: int) -> bool:
    """By the number of threads, too, on which torch's choice of a kernel may depend."""
    problem = problem_of(Direction.BACKWARD_FILTER, x, w, arguments)
    return problem is not None and writes_columns(evened(problem).problem)
