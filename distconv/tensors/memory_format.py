"""Channels-last memory formats: results keep the format of their operands."""

from __future__ import annotations

import functools

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


@functools.lru_cache(maxsize=8192)
def may_be_channels_last(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor may have a channels-last format: if the strides of every rank's shard show it.

    Shards that are empty, of one channel or of one pixel have the strides of both formats, and what is computed from
    them has the contiguous one. So that all ranks have one format, a tensor with such a shard is contiguous on all.
    """
    if len(shape) not in CHANNELS_LAST:
        return False
    least = [
        min(stop - start for start, stop in owners(mesh, dim_axes(mesh, placements, dim), extent))
        for dim, extent in enumerate(shape)
    ]
    return 0 not in least and least[1] > 1 and max(least[2:]) > 1
