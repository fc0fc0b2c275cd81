"""Reads this rank's samples of each batch of a DataLoader, and makes the DTensor of the whole batch from them.

The batches of indices of its batch sampler are cut to the samples that this rank reads.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from distconv.job.batches import BATCH, END, FAULT, Agreement, Batch
from distconv.job.sample_statistics import SampleStatistics
from distconv.job.supply import Cut, Supply
from distconv.reading.fault import ReadError
from distconv.reading.fetching import Draft, Fetching, Order, Part, Slab, Unread, UnreadBatch, WorkerStart
from distconv.reading.share import Share
from distconv.reading.source import Source
from distconv.reading.store import Numbers, sample
from distconv.settings import StoreOption
from distconv.tensors.dtensors import wrap


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
        self._statistics = SampleStatistics(mesh, self._share) if self._share.cuts_samples else None
        self._numbers = Numbers()
        self._to_device = ToDevice(mesh.device_type)
        self._taking: OwnIndices | None = None

    def share(self, loader: DataLoader[Any], indices: Any) -> OwnIndices:
        """The batch sampler of a sharded loader. ValueError for a loader that cannot be sharded."""
        if isinstance(loader.dataset, IterableDataset) or not loader._auto_collation:
            raise ValueError("sharded data: a DataLoader needs a map-style Dataset and a batch size or batch sampler")
        if not getattr(loader, "in_order", True):
            raise ValueError("sharded data: a DataLoader needs in_order=True")
        number = self._numbers(loader.dataset)
        return OwnIndices(loader, indices, self._share, number, self.supply, self._statistics)

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
            self._begin()
        cut = cuts.popleft()
        batch = self._completed(batch, own.number, cut, cuts[0] if self.supply is not None and cuts else None)
        if self.supply is not None:
            self.supply.end(cut)
            if cuts:
                self.supply.go_ahead(cuts[0])
        return tree_map(lambda leaf: self._whole(leaf, cut.count), batch)

    def close(self) -> None:
        """Waits until messages to other ranks are sent."""
        if self.supply is not None:
            self.supply.close()

    def _begin(self) -> None:
        """Receives the parts of the next batch that other ranks own, before a sample of it is made. Collective."""
        assert self._taking is not None and self.supply is not None
        cut = self._taking.cuts[0]
        if not self.supply.is_ready(cut):
            self._agreed(Batch(BATCH, cut.indices))  # or some would wait for others that do something else
        self.supply.ready(cut)

    def _of(self, index: Any) -> Any:
        assert self._taking is not None and self.supply is not None
        return self.supply.store.of(sample(self._taking.number, index))

    def _completed(self, batch: Any, number: int, cut: Cut, following: Cut | None) -> Any:
        """The batch, completed if a worker has made only a draft of it; all ranks have agreed to it. Collective."""
        draft, part = (batch, self._part(batch)) if isinstance(batch, Draft) else (None, Source.read)
        found = [] if draft is None else list(draft.found)
        while True:
            slabs: list[Any] = []
            wanted = [] if draft is None else self.fetch.open(draft.batch, draft.indices)
            try:
                if wanted:
                    slabs = self.fetch.slabs(wanted, part)
                elif draft is not None:
                    batch = self.fetch.finished(draft.batch, draft.indices, part)
                    refusal = "" if self.supply is None else self.supply.refusal(number, cut)
                    batch = UnreadBatch(refusal) if refusal else batch
            except ReadError as error:
                batch = UnreadBatch(str(error))
            if not self._agree(batch, cut, following, is_open=bool(wanted)):
                break
            assert self._statistics is not None
            fresh = self._statistics.find(wanted, slabs)
            found += fresh
            if draft is not None:
                values = {digest: value for _, digest, value in fresh}
                self.fetch.settle(draft.batch, draft.indices, values)
        if self._statistics is not None and found:
            self._statistics.learn(number, found)
        return batch

    def _part(self, draft: Draft) -> Part:
        """The function that reads a part: of those that a worker has read, else from the store or a file, each once."""
        read = {(sent.source, sent.region): sent.array() for sent in draft.parts}
        if self.supply is not None:
            self.supply.store.add(read.items())
            return self.supply.store.part

        def part(source: Source, region: Any) -> Any:
            key = source, region
            if key not in read:
                read[key] = source.read(region)
            return read[key]

        return part

    def _agree(self, batch: Any, cut: Cut, following: Cut | None, *, is_open: bool) -> bool:
        """Whether some rank has yet to find a statistic."""
        if isinstance(batch, UnreadBatch):
            self._agreed(Batch(FAULT, fault=batch.line))
        if isinstance(batch, Draft):
            batch = batch.batch
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Slab | Unread | torch.Tensor)]
        shapes = str([(tuple(leaf.shape[1:]), str(_dtype(leaf))) for leaf in leaves])
        sources = hash(tuple(leaf.checksum for leaf in leaves if not isinstance(leaf, torch.Tensor))) & 0xFFFFFFFF
        indices = cut.indices if following is None else f"{cut.indices} and then {following.indices}"
        return self._agreed(Batch(BATCH, indices, shapes, sources, self._share.of_samples, is_open=is_open))

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
        return self._to_device(read[: stop - start].contiguous())


def _dtype(leaf: Any) -> torch.dtype:
    if isinstance(leaf, Unread):
        return leaf.expression.dtype
    return leaf.local.dtype if isinstance(leaf, Slab) else leaf.dtype


class ToDevice:
    """Copies tensors of the host to a device.

    A script's host runs ahead of its GPU: when it asks for a batch, kernels of the step before are still queued. A copy
    in their stream would wait for all of them, so copies have a stream of their own, from pinned memory, and only what
    is computed from now on waits for them.

    ``device_type``: such as "cpu" or "cuda".
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._has_streams = device_type == "cuda" and torch.cuda.is_available()
        self._stream: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        if not self._has_streams or x.device.type != "cpu":
            return x.to(self._device_type)
        self._stream = self._stream or torch.cuda.Stream()
        pinned = x if x.is_pinned() else x.pin_memory()
        with torch.cuda.stream(self._stream):
            there = pinned.to(self._device_type, non_blocking=True)
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream)
        there.record_stream(current)  # or its memory could be given away while the program still computes with it
        return there


_DRAWN_AT_ONCE = (
    *(RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    *(list, tuple, range),
)
"""Samplers that draw no random numbers after the first sample: one batch more may be drawn from them ahead."""


class OwnIndices:
    """A batch sampler's batches, each cut to this rank's interval. `cuts` describes the batches still to be made."""

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: Any,
        share: Share,
        number: int,
        supply: Supply | None,
        statistics: SampleStatistics | None,
    ) -> None:
        self._batches, self._share, self._supply, self._statistics = batches, share, supply, statistics
        self.number = number  # The number of the data set.
        self._dataset, self._looks_ahead = loader.dataset, supply is not None and not loader.num_workers
        self.cuts: deque[Cut] = deque()

    def __len__(self) -> int:
        batches: Sized = self._batches
        return len(batches)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self.cuts.clear()
        seen = map(self._seen, self._batches)
        return _one_ahead(seen) if self._looks_ahead and _is_drawn_at_once(self._batches) else seen

    def _seen(self, batch: Sequence[Any]) -> Sequence[Any]:
        own = self._share.portion(batch)
        supply = self._supply
        indices = str(list(batch))
        cut = Cut(len(batch), indices) if supply is None else supply.cut(self.number, batch, self._of_epoch(len(batch)))
        self.cuts.append(cut)
        if supply is None and self._statistics is None:
            return own
        known = {} if self._statistics is None else self._statistics.known(self.number, own)
        return Order(own, read=supply is None or not supply.is_known(cut), known=known)

    def _of_epoch(self, count: int) -> int:
        known = []
        with contextlib.suppress(TypeError, NotImplementedError):
            known.append(len(self) * count)
        with contextlib.suppress(TypeError, NotImplementedError):
            known.append(len(self._dataset))  # type: ignore[arg-type]
        return min(known, default=count)


def _one_ahead(batches: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Yields batches one step late: each is drawn before the one ahead of it is given out."""
    before: list[Sequence[Any]] = []
    for batch in batches:
        yield from before
        before = [batch]
    yield from before


def _is_drawn_at_once(batches: Any) -> bool:
    if type(batches) is BatchSampler:
        batches = batches.sampler
    return type(batches) in _DRAWN_AT_ONCE
