"""Calls of a model whose input has fewer samples than there are ranks for them: some ranks would have no part of it.

Such a call runs whole on every rank if it records no gradient and fits a rank: nothing is sent, as suits the validation
of single images. Otherwise a line warns, once.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distconv.settings.partition import AXES, Kind, nested_ownership
from distconv.tensors.mesh import axis_names
from mucudnn.process.warning import print_line, warn

_told: set[str] = set()

_trained: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""By model: the elements of the largest part of an input with which a rank has kept activations for backward."""

_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # Those of which a line has said that they run whole.


def is_whole_as_well(module: nn.Module, mesh: DeviceMesh, inputs: Sequence[Tensor]) -> bool:
    """Whether a call runs whole on every rank, rather than with some ranks idle; the same on all ranks.

    It does where a rank would have all of the input anyway, or at most twice the largest part that it has trained with,
    which fits, as no activations are kept.
    """
    x = max(inputs, key=lambda each: each.numel(), default=None)
    if x is None or not x.dim() or not x.numel():
        return False
    axes = tuple(zip(axis_names(mesh), mesh.shape, strict=True))
    own = largest_part(axes, tuple(x.shape))
    if torch.is_grad_enabled():
        _trained[module] = max(own, _trained.get(module, 0))
        return False
    if x.shape[0] >= math.prod(size for name, size in axes if AXES[name].kind is Kind.SAMPLES):
        return False
    whole = x.numel() <= max(own, 2 * _trained.get(module, 0))
    if whole and module not in _whole:
        _whole.add(module)
        what = f"{type(module).__name__}, called with {tuple(x.shape)}, has fewer samples than there are ranks for them"
        warn(f"{what}: without gradients it runs whole on every rank", "distconv")
    return whole


@functools.lru_cache(maxsize=1024)
def largest_part(axes: tuple[tuple[str, int], ...], shape: tuple[int, ...]) -> int:
    """The elements of the largest part that a rank has of a tensor (N, C, spatial...), whose channels are not split."""
    extents = list(shape)
    for name, size in axes:
        dim = AXES[name].dim_of(len(shape))
        if dim is not None and AXES[name].kind is not Kind.CHANNELS:
            extents[dim] = -(-extents[dim] // size)
    return math.prod(extents)


def tell_idle(model: str, mesh: DeviceMesh, inputs: Sequence[Tensor]) -> None:
    """Prints a line where ranks have nothing of the largest whole input (N, C, spatial...); once in a process."""
    x = max(inputs, key=lambda each: each.numel(), default=None)
    if _told or x is None or x.dim() < 3 or not x.numel():
        return
    axes = tuple(zip(axis_names(mesh), mesh.shape, strict=True))
    working = at_work(axes, tuple(x.shape))
    if working < math.prod(size for _, size in axes):
        _told.add(model)
        if dist.get_rank() == 0:
            partition, ranks = ",".join(f"{name}={size}" for name, size in axes), mesh.size()
            line = f"under {partition} only {working} of {ranks} ranks have a part of it, and the others idle"
            advice = "give an axis at most as many ranks as there are samples, or rows"
            print_line(f"distconv: {model} is called with {tuple(x.shape)}: {line}; {advice}")


@functools.lru_cache(maxsize=1024)
def at_work(axes: tuple[tuple[str, int], ...], shape: tuple[int, ...]) -> int:
    """How many ranks have a part of a tensor; axes of channels, of which an input may have few, count as full.

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
