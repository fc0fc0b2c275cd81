"""Parameters that are sharded along all axes of a mesh: their layouts, gathering them, and scattering gradients.

Along the axes that shard channels, a rank computes with its own part of a parameter. Along the other axes, those of
samples and space, all ranks compute with the same values: sharding a parameter there only saves memory. So it is
gathered along these axes for each use, and its gradient is summed and scattered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.settings.partition import shards_channels
from distconv.tensors.dtensors import memory_format, rewrap, wrap
from distconv.tensors.layouts import owners
from distconv.tensors.mesh import axis_names, is_ours
from distconv.transfer.collectives import (
    all_gathered,
    all_reduced,
    gather_into,
    new_empty,
    scatter_sum,
    scatter_sum_into,
)
from distconv.transfer.group import joint_group, joint_order
from distconv.transfer.tracing import planned

LEAST_BYTES = 1 << 15
"""A parameter with fewer bytes on a rank stays whole: gathering it would cost more time than its memory is worth."""


def full_shards(mesh: DeviceMesh, placements: Sequence[Placement], parameter: Tensor) -> tuple[Placement, ...]:
    """A parameter's layout with Shard along the axes of samples and space too; unchanged where that saves little.

    They shard one dim that no axis shards yet: the first whose extent is a multiple of the ranks, else the largest.
    """
    shape, taken = parameter.shape, {p.dim for p in placements if isinstance(p, Shard)}
    axes = [axis for axis, name in enumerate(axis_names(mesh)) if not shards_channels(name) and mesh.size(axis) > 1]
    ranks = math.prod(map(mesh.size, axes))
    copies = math.prod(mesh.size(axis) for axis, p in enumerate(placements) if p.is_shard())
    dims = [dim for dim in range(len(shape)) if dim not in taken and shape[dim] >= ranks]
    bytes_here = parameter.numel() * parameter.element_size() // copies
    if not axes or not dims or bytes_here < LEAST_BYTES or parameter.is_complex():
        return tuple(placements)
    dim = next((dim for dim in dims if shape[dim] % ranks == 0), max(dims, key=shape.__getitem__))
    return tuple(Shard(dim) if axis in axes else p for axis, p in enumerate(placements))


@functools.lru_cache(maxsize=1024)
def used_placements(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The layout in which functions get a parameter: replicated along the axes that shard no channels."""
    names = axis_names(mesh)
    return tuple(p if shards_channels(name) else Replicate() for name, p in zip(names, placements, strict=True))


def is_fully_sharded(x: Tensor) -> bool:
    """Whether a parameter is sharded along axes along which functions get it whole."""
    if not isinstance(x, DTensor) or not isinstance(x, nn.Parameter) or not is_ours(x.device_mesh):
        return False
    return used_placements(x.device_mesh, x.placements) != x.placements


def some_fully_sharded(parameters: Iterable[Tensor]) -> bool:
    """Whether any of these parameters is fully sharded. Quick where all are plain, as is usual."""
    found = [*parameters]
    return {*map(type, found)} != {nn.Parameter} and any(map(is_fully_sharded, found))


class ShardDivision:
    """How the axes of samples and space divide a fully sharded parameter. Made by `division`."""

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> None:
        used = used_placements(mesh, placements)
        axes = tuple(axis for axis, pair in enumerate(zip(placements, used, strict=True)) if pair[0] != pair[1])
        (self.dim,) = {placements[axis].dim for axis in axes}  # type: ignore[attr-defined]
        others = tuple(axis for axis, p in enumerate(placements) if p.is_replicate() and mesh.size(axis) > 1)
        self._group, self._others = joint_group(mesh, axes), joint_group(mesh, others) if others else None
        order, self._place = joint_order(mesh, axes)
        intervals = owners(mesh, axes, shape[self.dim])
        self._intervals = [intervals[at] for at in order]  # By member of the group.
        self._most = max(stop - start for start, stop in intervals)
        self._is_even = self._intervals == [(at * self._most, (at + 1) * self._most) for at in range(len(order))]

    def __repr__(self) -> str:
        return f"ShardDivision(dim={self.dim}, {self._intervals})"

    def gather(self, local: Tensor) -> tuple[Tensor, Any]:
        """Begins to gather the parts. Returns the argument of `whole`, and the work to wait for."""
        own = self._sent(local)
        into = new_empty(own, (len(self._intervals), *own.shape))
        return into, gather_into(into.view(-1), own.view(-1), self._group)

    def _sent(self, local: Tensor) -> Tensor:
        own = local.movedim(self.dim, 0)
        if len(own) < self._most:
            own = torch.cat([own, own.new_zeros(self._most - len(own), *own.shape[1:])])
        return own.contiguous()

    def gathered(self, local: Tensor, form: torch.memory_format) -> Tensor:
        """All parts in one tensor, in a memory format; also in a graph that is traced."""
        own, ranks = self._sent(local), len(self._intervals)
        return self.whole(all_gathered(own.view(-1), ranks, self._group).view(ranks, *own.shape), form)

    def whole(self, parts: Tensor, form: torch.memory_format) -> Tensor:
        """The whole parameter from its gathered parts, in a memory format."""
        if self._is_even:
            joined = parts.flatten(0, 1)
        else:
            pairs = sorted(zip(self._intervals, parts, strict=True), key=lambda pair: pair[0])
            joined = torch.cat([part[: stop - start] for (start, stop), part in pairs])
        return joined.movedim(0, self.dim).contiguous(memory_format=form)

    def scatter(self, share: Tensor) -> tuple[Tensor, Any]:
        """Begins to sum the ranks' shares of a gradient. Returns the argument of `part`, and the work to wait for."""
        rows = self._by_member(share)
        into = new_empty(rows, (self._most, *rows.shape[1:]))
        return into, scatter_sum_into(into.view(-1), rows.view(-1), self._group)

    def _by_member(self, share: Tensor) -> Tensor:
        """The rows of the parts of all members, one after another."""
        rows = share.movedim(self.dim, 0)
        if not self._is_even:
            parts = rows.new_zeros(len(self._intervals), self._most, *rows.shape[1:])
            for part, (start, stop) in zip(parts, self._intervals, strict=True):
                part[: stop - start] = rows[start:stop]
            rows = parts.flatten(0, 1)
        return rows.contiguous()

    def summed(self, share: Tensor) -> Tensor:
        """This rank's part of the sum of all ranks' shares; also in a graph that is traced. Collective."""
        rows = self._by_member(share)
        sums = scatter_sum(rows.view(-1), len(self._intervals), self._group)
        return self.part(sums.view(self._most, *rows.shape[1:]))

    def part(self, sums: Tensor) -> Tensor:
        """This rank's part of the whole sum. Collective over the ranks with the same part, if there are several."""
        if self._others is not None:
            sums = all_reduced(sums, self._others)
        start, stop = self._intervals[self._place]
        return sums[: stop - start].movedim(0, self.dim).contiguous()


@planned(8192)
def _division(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> ShardDivision:
    return ShardDivision(mesh, placements, shape)


def division(parameter: DTensor) -> ShardDivision:
    """How a fully sharded parameter is divided. Collective where its group has to be made."""
    return _division(parameter.device_mesh, tuple(parameter.placements), parameter.shape)


def gradient(part: Tensor, parameter: Any) -> DTensor:
    """This rank's part of the gradient of a sharded parameter, in the parameter's layout."""
    # The part is contiguous. A contiguous parameter may belong to a channels_last whole, whose strides are kept.
    if parameter._local_tensor.is_contiguous():
        return rewrap(part, parameter)
    return wrap(part, parameter.device_mesh, parameter.placements, parameter.shape)


def format_of(parameter: DTensor) -> torch.memory_format:
    """The memory format of the whole parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return memory_format(parameter)
