"""The ranks of a job whose models run within a limit of memory: how they agree, and what each can still allocate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv import settings
from distconv.model.choosing import on_all_ranks
from distconv.settings.partition import AXES, Kind, Partition
from distconv.tensors import hooks
from distconv.tensors.gathering.memory import free_here, free_on_host
from distconv.tensors.mesh import whole_group

T = TypeVar("T")


def extents_of(inputs: Sequence[Tensor]) -> dict[str, int]:
    """The extents that can be cut, by axis, of the largest input among those with the most dims."""
    x = max(inputs, key=lambda each: (each.dim(), each.numel()), default=torch.empty(()))
    dims = {axis.name: axis.dim_of(x.dim()) for axis in AXES.values() if axis.kind is not Kind.CHANNELS}
    return {name: x.shape[dim] for name, dim in dims.items() if dim is not None and x.shape[dim] > 1}


class Ranks:
    """The ranks of a partition; the first one follows each kind of call, and chooses for all.

    ``mesh``: the mesh of these ranks; None where they are imagined, and calls are only followed.
    """

    def __init__(self, partition: Partition, mesh: DeviceMesh | None = None) -> None:
        self.partition, self._mesh = partition, mesh

    def agreed(self, choose: Callable[[], T]) -> T:
        """The choice of the first rank, on every rank. Collective."""
        return choose() if self._mesh is None else on_all_ranks(choose, whole_group(self._mesh))

    def shard(self, module: nn.Module) -> None:
        """Shards a model's parameters along all axes, as its call would, if the job does that: they then count with
        their bytes on a rank. Collective."""
        if hooks.scripts and settings.value("shard_parameters"):
            hooks.scripts[-1].assignments(module)

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks. Collective."""
        found = [text]
        if self._mesh is not None:
            found *= self._mesh.size()
            dist.all_gather_object(found, text, group=whole_group(self._mesh))
        return found

    def most(self, sizes: Sequence[int], device: str) -> list[int]:
        """The largest of each of several numbers on any rank. Collective."""
        if self._mesh is None:
            return list(sizes)
        found = torch.tensor(sizes, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=whole_group(self._mesh))
        return found.tolist()

    def free(self, device: str) -> int:
        """The fewest bytes that a rank may still allocate on its device; the ranks of a host share it. Collective."""
        if self._mesh is None:
            return free_here(device)
        here = free_on_host(self._mesh) if device == "cpu" else free_here(device)
        least = torch.tensor(here, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=whole_group(self._mesh))
        return int(least)

    def extents_of(self, inputs: Sequence[Tensor]) -> dict[str, int]:
        """The extents of a rank's part of the inputs that can be cut, by axis; none where these are sharded already."""
        if any(isinstance(x, DTensor) for x in inputs):
            return {}
        sizes = dict(self.partition.axes)
        found = {name: -(-extent // sizes.get(name, 1)) for name, extent in extents_of(inputs).items()}
        return {name: extent for name, extent in found.items() if extent > 1}
