"""Makes the DataLoaders of an unmodified script read only their part on each rank."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from distconv.job.random_state import as_text, from_text, set_generators, state_of_generators
from distconv.job.samples import Samples
from distconv.model.choosing import ranks_here
from distconv.private_names import LOADING, READING, lacks, refused, require
from distconv.reading.fetching import fetched_by
from distconv.settings import StoreOption
from distconv.settings.partition import shards_data
from distconv.tensors.process_groups import new_group
from mucudnn.process import print_line, substituted

BATCHES = 32  # The ranks agree on their random state at least once in so many batches.

_STATE_BYTES = 32768  # the states of all generators, as text, take about 17,000


@contextlib.contextmanager
def loading(mesh: DeviceMesh, *, shard: bool = False, store: StoreOption | None = None) -> Iterator[Samples | None]:
    """A context in which every rank of `mesh` draws the same batches from any DataLoader, as one process would.

    Before a batch that draws random numbers all ranks take the random state of the mesh's first rank, so that shuffling
    and augmentation stay the same even where a script has drawn something else on one rank. A loader with workers draws
    none in this process, and one whose second batch draws none is taken to go on like that: for these the ranks agree
    at the first batch and after each `BATCHES`.

    With `shard`, a rank reads only the samples of its coordinate on the `sample` axis, out of the very batch that one
    process would read, and of arrays in files that the Dataset passes on as they are only its part in space; each
    tensor of the batch, local shape (n_local, ...), leaves the loader as a DTensor of the whole batch, shape (n, ...),
    sharded on dim 0, and by its dims of space where it was read in parts. Random augmentation then differs from one
    process (a rank draws for its own samples only). ValueError for a mesh that shards nothing but channels, a loader
    without batches of indices (an IterableDataset, or batch_size=None), one with in_order=False, and a collate_fn that
    returns tensors not of shape (n_local, ...). With `store`, a rank keeps the parts of arrays in files that it reads.
    The context gives the object that cuts the batches, or None where data are not sharded.
    """
    if shard and not shards_data(mesh.mesh_dim_names or ()):
        raise ValueError(f"sharded data needs an axis sample or one of space in the partition: {mesh.mesh_dim_names}")
    if shard:
        require(READING)
    if line := lacks(LOADING):
        with substituted(DataLoader, __iter__=refused(line)):
            yield None
        return
    common_state = _CommonRandomState(mesh)
    ranks = 1 if common_state.group is None else ranks_here(common_state.group)
    samples = Samples(mesh, store) if shard else None
    begin, following = DataLoader.__iter__, _BaseDataLoaderIter.__next__
    begun: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()
    """The number of batches that each iterator has given, and whether they draw random numbers in this process."""

    def iterate(loader: DataLoader[Any]) -> Any:
        common_state()
        if not shard and dist.get_rank() == 0:
            _report_workers(loader.num_workers, ranks, len(os.sched_getaffinity(0)))
        return samples.begin(loader, begin) if samples else begin(loader)

    def next_batch(iterator: Any) -> Any:
        if samples:
            common_state()
            batch = samples.take(iterator, following)
            if iterator._num_workers == 0:  # reading drew random numbers in this process, for its samples
                common_state()
            return batch
        number, draws = begun.get(iterator, (0, iterator._num_workers == 0))
        if draws or number % BATCHES == 0:
            common_state()
        before = as_text(state_of_generators()) if draws and number == 1 else None  # the first also seeds the sampler
        batch = following(iterator)
        if before is not None:
            draws = as_text(state_of_generators()) != before
        begun[iterator] = number + 1, draws
        return batch

    with substituted(DataLoader, __iter__=iterate), substituted(_BaseDataLoaderIter, __next__=next_batch):
        if not samples:
            yield None
            return
        indices: Any = DataLoader._index_sampler
        own_indices = property(lambda loader: samples.share(loader, indices.fget(loader)))
        with (
            substituted(DataLoader, _index_sampler=own_indices),
            substituted(_MapDatasetFetcher, fetch=fetched_by(samples.fetch)),
            contextlib.closing(samples),
        ):
            yield samples


def too_many_workers(workers: int, ranks: int, cores: int) -> str | None:
    """A line about a DataLoader whose workers on all ranks of a machine are more than its cores, where fewer help.

    They are not made fewer by themselves: which worker reads a batch decides what random augmentation draws.
    """
    enough = max(1, cores // ranks)
    if workers <= enough:
        return None
    return (
        f"{workers} workers of a DataLoader on each of {ranks} ranks are {workers * ranks} processes on {cores} cores;"
        f" num_workers={enough} may be faster"
    )


@functools.lru_cache(maxsize=64)
def _report_workers(workers: int, ranks: int, cores: int) -> None:
    line = too_many_workers(workers, ranks, cores) if ranks > 1 else None
    if line:
        print_line(f"distconv: {line}")


class _CommonRandomState:
    """Gives every rank of a mesh the random state of its first rank: one broadcast, in a group of its own."""

    def __init__(self, mesh: DeviceMesh) -> None:
        ranks = mesh.mesh.flatten().tolist()
        self._first, self._process = ranks[0], os.getpid()
        # A group of its own: a script may prefetch in another thread, where the order among other collectives is open.
        # The states stay on the host, so that no rank waits for its GPU; NCCL has no collectives there.
        host = "gloo" if dist.get_backend() == "nccl" else None
        self.group = new_group(ranks, backend=host) if len(ranks) > 1 else None
        # Such a thread begins with the machine's first GPU as its current one, whichever is this rank's.
        on_gpu = mesh.device_type == "cuda" and torch.cuda.is_available()
        self._gpu = torch.cuda.current_device() if on_gpu else None

    def __call__(self) -> None:
        if self.group is not None and self._process == os.getpid():  # not in a worker that has loaders of its own
            with contextlib.nullcontext() if self._gpu is None else torch.cuda.device(self._gpu):
                self._share()

    def _share(self) -> None:
        own = as_text(state_of_generators())
        state = torch.frombuffer(bytearray(own.ljust(_STATE_BYTES, b"\0")), dtype=torch.uint8)
        dist.broadcast(state, self._first, group=self.group)
        common = state.numpy().tobytes().rstrip(b"\0")
        if common != own:
            set_generators(from_text(common))
