"""Which samples of each batch are this rank's, and the DTensor of the whole batch that they are a part of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from distconv.dtensors import wrap
from distconv.job.batches import BATCH, END, FAULT, Agreement, Batch
from distconv.reading.fetching import Fault, Fetching, Slab, WorkerStart
from distconv.reading.share import Share


class Samples:
    """The batches of DataLoaders on a mesh: each rank's samples, and of lazy ones its part in space."""

    def __init__(self, mesh: DeviceMesh) -> None:
        names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate()
        assert coordinate is not None
        self._mesh = mesh
        self._share = Share(tuple(names), tuple(mesh.shape), tuple(coordinate))
        self._agreed = Agreement(mesh)
        self._placements: list[Placement] = [Shard(0) if name == "sample" else Replicate() for name in names]
        self.fetch = Fetching(self._share)

    def share(self, loader: DataLoader[Any], indices: Any) -> OwnIndices:
        """What a loader takes for its batch sampler. ValueError for a loader that cannot be sharded."""
        if isinstance(loader.dataset, IterableDataset) or not loader._auto_collation:
            raise ValueError("sharded data: a DataLoader needs a map-style Dataset and a batch size or batch sampler")
        if not getattr(loader, "in_order", True):
            raise ValueError("sharded data: a DataLoader needs in_order=True")
        return OwnIndices(indices, self._share.samples)

    def begin(self, loader: DataLoader[Any], begin: Callable[[Any], Any]) -> Any:
        """A loader's iterator; its workers, where they are new processes, learn how to read."""
        start = loader.worker_init_fn
        if loader.num_workers and not isinstance(start, WorkerStart):
            loader.worker_init_fn = WorkerStart(self.fetch, start)
        try:
            return begin(loader)
        finally:
            loader.worker_init_fn = start

    def take(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        """The next batch. Collective; on every rank the same ReadError where one of them cannot read its part."""
        cuts: deque[Cut] = iterator._index_sampler.cuts
        try:
            batch = following(iterator)
        except StopIteration:
            self._agreed(Batch(END))
            raise
        except Exception:
            cuts.popleft()
            raise
        cut = cuts.popleft()
        self._agree(batch, cut)
        return tree_map(lambda leaf: self._whole(leaf, cut.count), batch)

    def _agree(self, batch: Any, cut: Cut) -> None:
        if isinstance(batch, Fault):
            self._agreed(Batch(FAULT, fault=batch.line))
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Slab | torch.Tensor)]
        shapes = str(
            [
                (tuple(leaf.shape[1:]), str(leaf.local.dtype if isinstance(leaf, Slab) else leaf.dtype))
                for leaf in leaves
            ]
        )
        told = hash(tuple(leaf.told for leaf in leaves if isinstance(leaf, Slab))) & 0xFFFFFFFF
        self._agreed(Batch(BATCH, cut.indices, shapes, told, self._share.of_samples))

    def _whole(self, leaf: Any, count: int) -> Any:
        if isinstance(leaf, Slab):
            own = self._own(leaf.local, leaf.shape, count)
            return wrap(own, self._mesh, self._share.placements(len(leaf.shape)), (count, *leaf.shape[1:]))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        local = self._own(leaf, leaf.shape, count)
        shape = torch.Size((count, *local.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self._mesh, self._placements, run_check=False, shape=shape, stride=stride)

    def _own(self, read: torch.Tensor, shape: Sequence[int], count: int) -> torch.Tensor:
        start, stop = self._share.samples(count)
        samples = max(stop - start, 1)
        if not shape or shape[0] != samples:
            raise ValueError(
                f"sharded data: the loader made a tensor of shape {tuple(shape)} from {samples} samples; "
                f"accepted: the samples on dim 0"
            )
        return read[: stop - start].contiguous().to(self._mesh.device_type)


@dataclass(frozen=True)
class Cut:
    """A batch before it was cut: how many samples, and which."""

    count: int
    indices: str


class OwnIndices:
    """A batch sampler's batches, each cut to this rank's interval; `cuts` tells what they were."""

    def __init__(self, batches: Any, interval: Callable[[int], tuple[int, int]]) -> None:
        self._batches, self._interval = batches, interval
        self.cuts: deque[Cut] = deque()

    def __len__(self) -> int:
        batches: Sized = self._batches
        return len(batches)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self.cuts.clear()
        return self._cut()

    def _cut(self) -> Iterator[Sequence[Any]]:
        for batch in self._batches:
            start, stop = self._interval(len(batch))
            self.cuts.append(Cut(len(batch), str(list(batch))))
            # A rank with no sample of this batch reads one all the same: it tells shape and dtype.
            yield batch[start:stop] if stop > start else batch[:1]
