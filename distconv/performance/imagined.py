"""An imagined job: only this process exists of its many ranks, and its tensors have no data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv import settings
from distconv.rules.convolution.kernels import as_on_a_processor
from distconv.settings.partition import Partition
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import local_shape
from distconv.tensors.mesh import make_mesh, placements


@contextlib.contextmanager
def imagined_job(ranks: int, threads: int | None = None, rank: int | None = None) -> Iterator[int]:
    """A job of which only this process exists; returns its rank. Messages go nowhere.

    Args:
        threads: that each rank has on a processor, where its kernels are to be those that it takes there: for some,
            torch decides by threads. None for kernels by their names, of a machine that is not here.
        rank: which one is there. None for a third of their number, rounded down: in numbers to the base of two its
            digits alternate, so that on every axis of four or more ranks it has neighbours on both sides.

    Raises:
        RuntimeError: where the process is in a job already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("an imagined job needs a process that is in no job")
    rank = ranks // 3 if rank is None else rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with settings.options({"check": "off"}), as_on_a_processor(threads) if threads else contextlib.nullcontext():
            yield rank
    finally:
        dist.destroy_process_group()


def mesh_of(partition: Partition) -> DeviceMesh:
    """The mesh of a partition in an imagined job, over its first ranks where the job has more."""
    ranks = range(partition.ranks) if partition.ranks < dist.get_world_size() else None
    return make_mesh(partition, ranks=ranks)


def empty_shard(mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype) -> DTensor:
    """This rank's part of an activation without data."""
    layout = placements(mesh, len(shape))
    return wrap(torch.empty(local_shape(mesh, layout, shape), device="meta", dtype=dtype), mesh, layout, tuple(shape))
