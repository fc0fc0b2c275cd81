"""Channels-last memory formats, which results keep."""

from __future__ import annotations

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dims."""


def memory_format(x: Tensor) -> torch.memory_format:
    """The channels-last format of x where it has that and no other, else the contiguous one."""
    last = CHANNELS_LAST.get(x.dim())
    if last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format
