"""What the DataLoaders of an unmodified script read on each rank."""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from distconv.job.random_state import set_generators, state_of_generators
from distconv.partition import ownership

_STATE_BYTES = 16384  # the states of all generators, pickled, take about 10,000


@contextlib.contextmanager
def loading(mesh: DeviceMesh, *, shard: bool = False) -> Iterator[None]:
    """Within it, every rank of `mesh` draws the same batches from any DataLoader, as one process would.

    Before each batch all ranks take the random state of the mesh's first rank, so that shuffling and augmentation stay
    alike even where ranks have drawn differently (dropout on shards of different sizes).

    With `shard`, a rank reads only the samples of its coordinate on the `sample` axis, out of the very batch that one
    process would read; each tensor of the batch, local shape (n_local, ...), leaves the loader as a DTensor of the
    whole batch, shape (n, ...), sharded on dim 0. Random augmentation then differs from one process (a rank draws for
    its own samples only). ValueError for a mesh without a `sample` axis, a loader without batches of indices (an
    IterableDataset, or batch_size=None), one with in_order=False, and a collate_fn that returns tensors not of shape
    (n_local, ...).
    """
    if shard and "sample" not in (mesh.mesh_dim_names or ()):
        raise ValueError(f"sharded data needs an axis sample in the partition, which has {mesh.mesh_dim_names}")
    alike = _Alike(mesh)
    samples = _Samples(mesh) if shard else None
    begin, following = DataLoader.__iter__, _BaseDataLoaderIter.__next__
    indices: Any = DataLoader._index_sampler

    def iterate(loader: DataLoader[Any]) -> Any:
        alike()
        return begin(loader)

    def next_batch(iterator: Any) -> Any:
        alike()
        batch = samples.take(iterator, following) if samples else following(iterator)
        if iterator._num_workers == 0:  # reading drew random numbers in this process
            alike()
        return batch

    DataLoader.__iter__, _BaseDataLoaderIter.__next__ = iterate, next_batch  # type: ignore[method-assign, assignment]
    if samples:
        DataLoader._index_sampler = property(  # type: ignore[assignment, method-assign]
            lambda loader: samples.share(loader, indices.fget(loader))
        )
    try:
        yield
    finally:
        DataLoader.__iter__, _BaseDataLoaderIter.__next__ = begin, following  # type: ignore[method-assign]
        DataLoader._index_sampler = indices  # type: ignore[method-assign]


class _Alike:
    """Gives every rank of a mesh the random state of its first rank: one broadcast, in a group of its own."""

    def __init__(self, mesh: DeviceMesh) -> None:
        ranks = mesh.mesh.flatten().tolist()
        self._first = ranks[0]
        # A group of its own: a script may prefetch in another thread, where the order among other collectives is open.
        # The states stay on the host, so that no rank waits for its GPU; NCCL has no collectives there.
        host = "gloo" if dist.get_backend() == "nccl" else None
        self._group = dist.new_group(ranks, backend=host) if len(ranks) > 1 else None
        # Such a thread begins with the machine's first GPU as its current one, whichever is this rank's.
        on_gpu = mesh.device_type == "cuda" and torch.cuda.is_available()
        self._gpu = torch.cuda.current_device() if on_gpu else None

    def __call__(self) -> None:
        if self._group is not None:
            with contextlib.nullcontext() if self._gpu is None else torch.cuda.device(self._gpu):
                self._share()

    def _share(self) -> None:
        state = torch.zeros(_STATE_BYTES, dtype=torch.uint8, device="cpu")
        if dist.get_rank() == self._first:
            packed = pickle.dumps(state_of_generators())
            state[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        dist.broadcast(state, self._first, group=self._group)
        if dist.get_rank() != self._first:
            set_generators(pickle.loads(state.numpy().tobytes()))


class _Samples:
    """Which samples of each batch are this rank's, and the DTensor of the whole batch that they are a shard of."""

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        self._mesh = mesh
        self._ranks, self._coordinate = mesh.size(names.index("sample")), mesh.get_local_rank("sample")
        self._placements: list[Placement] = [Shard(0) if name == "sample" else Replicate() for name in names]

    def share(self, loader: DataLoader[Any], indices: Any) -> _OwnIndices:
        if isinstance(loader.dataset, IterableDataset) or not loader._auto_collation:
            raise ValueError("sharded data: a DataLoader needs a map-style Dataset and a batch size or batch sampler")
        if not getattr(loader, "in_order", True):
            raise ValueError("sharded data: a DataLoader needs in_order=True")
        return _OwnIndices(indices, self._interval)

    def take(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        counts: deque[int] = iterator._index_sampler.counts
        try:
            batch = following(iterator)
        except StopIteration:
            raise
        except Exception:
            counts.popleft()
            raise
        count = counts.popleft()
        return tree_map(lambda leaf: self._whole(leaf, count) if isinstance(leaf, torch.Tensor) else leaf, batch)

    def _interval(self, count: int) -> tuple[int, int]:
        return ownership(count, self._ranks)[self._coordinate]

    def _whole(self, local: torch.Tensor, count: int) -> DTensor:
        start, stop = self._interval(count)
        read = max(stop - start, 1)
        if local.dim() == 0 or local.shape[0] != read:
            raise ValueError(
                f"sharded data: the loader made a tensor of shape {tuple(local.shape)} from {read} samples; "
                f"accepted: the samples on dim 0"
            )
        local = local[: stop - start].contiguous().to(self._mesh.device_type)
        shape = torch.Size((count, *local.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self._mesh, self._placements, run_check=False, shape=shape, stride=stride)


class _OwnIndices:
    """A batch sampler's batches, each cut to this rank's interval; `counts` tells the sizes they had."""

    def __init__(self, batches: Any, interval: Callable[[int], tuple[int, int]]) -> None:
        self._batches, self._interval = batches, interval
        self.counts: deque[int] = deque()

    def __len__(self) -> int:
        batches: Sized = self._batches
        return len(batches)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self.counts.clear()
        return self._cut()

    def _cut(self) -> Iterator[Sequence[Any]]:
        for batch in self._batches:
            start, stop = self._interval(len(batch))
            self.counts.append(len(batch))
            # A rank with no sample of this batch reads one all the same: it tells shape and dtype.
            yield batch[start:stop] if stop > start else batch[:1]
