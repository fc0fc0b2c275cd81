"""Warns, once, when a model is called with an input too small for its ranks: some have no part of it, and idle."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.settings.partition import AXES, Kind, nested_ownership
from distconv.tensors.mesh import axis_names
from mucudnn.process.warning import print_line

_warned: set[str] = set()


def warn_of_idle(model: str, mesh: DeviceMesh, inputs: Sequence[Tensor]) -> None:
    """Prints a line if some ranks have no part of the largest whole input (N, C, spatial...); once in a process."""
    x = max(inputs, key=lambda each: each.numel(), default=None)
    if _warned or x is None or x.dim() < 3 or not x.numel():
        return
    axes = tuple(zip(axis_names(mesh), mesh.shape, strict=True))
    working = working_ranks(axes, tuple(x.shape))
    if working < math.prod(size for _, size in axes):
        _warned.add(model)
        if dist.get_rank() == 0:
            partition, ranks = ",".join(f"{name}={size}" for name, size in axes), mesh.size()
            line = f"under {partition} only {working} of {ranks} ranks have a part of it, and the others idle"
            advice = "give an axis at most as many ranks as there are samples, or rows"
            print_line(f"distconv: {model} is called with {tuple(x.shape)}: {line}; {advice}")


@functools.lru_cache(maxsize=1024)
def working_ranks(axes: tuple[tuple[str, int], ...], shape: tuple[int, ...]) -> int:
    """How many ranks have a part of a tensor. An axis of channels counts as full: an input may have few channels.

    Args:
        axes: names and sizes of the mesh.
        shape: (N, C, spatial...).
    """
    found, sizes = 1, dict[int, list[int]]()
    for name, size in axes:
        axis = AXES.get(name)
        dim = None if axis is None or axis.kind is Kind.CHANNELS else axis.dim_of(len(shape))
        if dim is None:
            found *= size
        else:
            sizes.setdefault(dim, []).append(size)
    for dim, each in sizes.items():
        found *= sum(start < stop for start, stop in nested_ownership(shape[dim], each))
    return found
