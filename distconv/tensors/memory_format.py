"""Channels-last memory formats: results keep the format of their operands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from distconv.tensors.layouts import dim_axes, owners

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last memory formats by the number of dims."""


def memory_format(x: Tensor) -> torch.memory_format:
    """The channels-last format of x where it has that and no other, else the contiguous one."""
    last = CHANNELS_LAST.get(x.dim())
    if last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format


def shows_memory_format(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> bool:
    """Whether the strides of every rank's shard show that the whole tensor is channels_last; the same on all ranks.

    Shards that are empty, of one channel or of one pixel have the strides of both formats.
    """
    least = [
        min(stop - start for start, stop in owners(mesh, dim_axes(mesh, placements, dim), extent))
        for dim, extent in enumerate(shape)
    ]
    return 0 not in least and least[1] > 1 and max(least[2:]) > 1
