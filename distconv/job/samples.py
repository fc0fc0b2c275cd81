"""Which samples of each batch are this rank's, and the DTensor of the whole batch that they are a part of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from distconv.dtensors import wrap
from distconv.job.batches import BATCH, END, FAULT, Agreement, Batch
from distconv.job.cutting import OwnIndices
from distconv.job.supply import Cut, Supply, sample
from distconv.reading.draft import Draft
from distconv.reading.fault import ReadError
from distconv.reading.fetching import Fault, Fetching, Slab, WorkerStart
from distconv.reading.share import Share
from distconv.settings import StoreOption


class Samples:
    """The batches of DataLoaders on a mesh: each rank's samples, and of lazy ones its part in space."""

    def __init__(self, mesh: DeviceMesh, store: StoreOption | None = None) -> None:
        names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate()
        assert coordinate is not None
        self._mesh = mesh
        self._share = Share(tuple(names), tuple(mesh.shape), tuple(coordinate))
        self._agreed = Agreement(mesh)
        self._placements: list[Placement] = [Shard(0) if name == "sample" else Replicate() for name in names]
        self.fetch = Fetching(self._share, drafts=store is not None)
        self.supply = None if store is None else Supply(mesh, self._share, store)
        if self.supply is not None:
            self.fetch.keeper = self.supply.store
            self.fetch.begin = self._begin
            self.fetch.around = self._of
        self._taking: OwnIndices | None = None

    def share(self, loader: DataLoader[Any], indices: Any) -> OwnIndices:
        """What a loader takes for its batch sampler. ValueError for a loader that cannot be sharded."""
        if isinstance(loader.dataset, IterableDataset) or not loader._auto_collation:
            raise ValueError("sharded data: a DataLoader needs a map-style Dataset and a batch size or batch sampler")
        if not getattr(loader, "in_order", True):
            raise ValueError("sharded data: a DataLoader needs in_order=True")
        return OwnIndices(loader, indices, self._share, self.supply)

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
        self._taking = own = iterator._index_sampler
        cuts: deque[Cut] = own.cuts
        try:
            batch = following(iterator)
        except StopIteration:
            self._agreed(Batch(END))
            raise
        except Exception:
            cuts.popleft()
            raise
        if self.supply is not None:
            batch = self._completed(self.supply, batch, own)
        cut = cuts.popleft()
        self._agree(batch, cut, cuts[0] if self.supply is not None and cuts else None)
        if self.supply is not None:
            self.supply.end(cut)
            if cuts:
                self.supply.go_ahead(cuts[0])
        return tree_map(lambda leaf: self._whole(leaf, cut.count), batch)

    def close(self) -> None:
        """Waits for what other ranks are sent."""
        if self.supply is not None:
            self.supply.close()

    def _begin(self) -> None:
        """Before a sample of the batch that is taken is made: brings what other ranks have of it. Collective."""
        assert self._taking is not None and self.supply is not None
        cut = self._taking.cuts[0]
        if not self.supply.is_ready(cut):
            self._agreed(Batch(BATCH, cut.indices))  # or some would wait for others that have come to something else
        self.supply.ready(cut)

    def _of(self, index: Any) -> Any:
        assert self._taking is not None and self.supply is not None
        return self.supply.store.of(sample(self._taking.number, index))

    def _completed(self, supply: Supply, batch: Any, own: OwnIndices) -> Any:
        """A draft with its parts from the store, other ranks and files."""
        self._begin()
        if not isinstance(batch, Draft):
            return batch
        supply.store.bring(((part.source, part.region), part.array()) for part in batch.parts)
        try:
            batch = self.fetch.finished(batch.batch, batch.indices, supply.store.part)
        except ReadError as error:
            return Fault(str(error))
        refusal = supply.refusal(own.number, own.cuts[0])
        return Fault(refusal) if refusal else batch

    def _agree(self, batch: Any, cut: Cut, following: Cut | None) -> None:
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
        indices = cut.indices if following is None else f"{cut.indices} and then {following.indices}"
        self._agreed(Batch(BATCH, indices, shapes, told, self._share.of_samples))

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
