"""Fetches a rank's samples of a batch: the Dataset makes them, and only the rank's part is read.

A draft is a batch whose parts are still to be read: a store supplies them in place of files.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from distconv.reading.expression import Expression, Joined, empty_array
from distconv.reading.fault import ReadError, as_read_error
from distconv.reading.interception import lazily, renew
from distconv.reading.share import Share
from distconv.reading.source import Keeper, Source
from distconv.reading.statistic import Known, Statistic, asking, digest_text, statistics_in
from distconv.reading.tensor import LazyTensor
from distconv.reading.view import Region


@dataclass(frozen=True)
class Slab:
    """A rank's part of a batch of its samples, `shape` (samples, ...) without the cuts."""

    local: Tensor  # The part that was read.
    shape: tuple[int, ...]
    checksum: int  # A checksum of the files, and of their parts, from which the samples are made.

    def pin_memory(self, device: Any = None) -> Slab:
        return Slab(self.local.pin_memory(), self.shape, self.checksum)


@dataclass(frozen=True)
class UnreadBatch:
    """A batch that cannot be read: the line that says why."""

    line: str


Around = Callable[[Any], contextlib.AbstractContextManager[Any]]
"""A context that is entered while the sample of an index is made or read."""


class Fetching:
    """Stands in for what makes a batch of a Dataset with indices. What `of_a_worker` gives can be sent to a process.

    With `drafts` a batch is a `Draft`; a worker reads for it what it was ordered to read, and in the script's own
    process nothing is read. `keeper` and `around` are for the samples that this process makes.
    """

    def __init__(self, share: Share, *, drafts: bool = False) -> None:
        self.share, self._drafts = share, drafts
        self.begin: Callable[[], None] | None = None
        self.keeper: Keeper | None = None
        self.around: Around = contextlib.nullcontext

    def of_a_worker(self) -> Fetching:
        """The same, without what belongs to the script's own process."""
        return Fetching(self.share, drafts=self._drafts)

    def __call__(self, fetcher: Any, indices: Any) -> Any:
        if self.begin is not None:
            self.begin()
        known = Known(getattr(indices, "known", {})) if self.share.cuts_samples else None
        try:
            with lazily(self.keeper), asking(known):
                samples = self._samples(fetcher.dataset, indices, known)
                with self.around(indices[0]), _at(indices):
                    batch = fetcher.collate_fn(samples)
                unread = tree_map(_unread, batch)
                if known is not None:
                    self.settle(unread, indices, known.values)
                learnt = known is not None and any(each.digest not in known.values for _, each in known.asked)
                if not self._drafts and not learnt and not self.open(unread, indices):
                    return self.finished(unread, indices, Source.read)
                reads = get_worker_info() is not None and getattr(indices, "read", True)
                found = known.found() if known is not None else ()
                return Draft(unread, list(indices), self._read_for(unread, indices) if reads else (), found)
        except ReadError as error:
            return UnreadBatch(str(error))

    def open(self, batch: Any, indices: Sequence[Any]) -> list[tuple[Any, Statistic]]:
        """The statistics that have to be known before more can be computed, each with the index of a sample."""
        found: dict[str, tuple[Any, Statistic]] = {}
        for sample, each in self._unknown(batch, indices):
            if all(inner.value is not None for inner in statistics_in(each.parent)):
                found.setdefault(each.digest, (sample, each))
        return list(found.values())

    def settle(self, batch: Any, indices: Sequence[Any], values: Mapping[str, Any]) -> None:
        """Gives the statistics of a batch their values, by digest, where these are known."""
        for _, each in self._unknown(batch, indices):
            each.value = values.get(each.digest)

    def _unknown(self, batch: Any, indices: Sequence[Any]) -> Iterator[tuple[Any, Statistic]]:
        """The statistics of a batch that have no value yet, each with the index of a sample."""
        for expression, _, sample in self._every_piece(batch, indices):
            yield from ((sample, each) for each in statistics_in(expression) if each.value is None)

    def _every_piece(self, batch: Any, indices: Sequence[Any]) -> Iterator[tuple[Expression, Any, Any]]:
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Unread):
                yield from self._pieces(leaf, indices)

    def slab(self, statistic: Statistic) -> Region:
        """The region that this rank reads of what a statistic is computed of."""
        return self.share.region((1, *statistic.parent.shape))[1:]

    def slabs(self, wanted: Sequence[tuple[Any, Statistic]], part: Part) -> list[Any]:
        """The slabs that this rank reads for statistics. ReadError if they cannot be read."""
        read: dict[str, Any] = {}  # several statistics may be of one array
        texts = [digest_text(statistic.parent) for _, statistic in wanted]
        for text, (sample, statistic) in zip(texts, wanted, strict=True):
            if text not in read:
                with self.around(sample), _at(sample):
                    read[text] = statistic.parent.read(self.slab(statistic), part)
        return [read[text] for text in texts]

    def finished(self, batch: Any, indices: Sequence[Any], part: Part) -> Any:
        """The batch with every `Unread` leaf read by `part`. ReadError where one cannot be read."""

        def finished(leaf: Any) -> Any:
            if not isinstance(leaf, Unread):
                return leaf
            pieces = list(self._pieces(leaf, indices))
            if not _is_stacked(leaf.expression):
                ((expression, region, sample),) = pieces
                with self.around(sample), _at(list(indices)):
                    return Slab(expression.read(region, part), leaf.shape, leaf.checksum)
            whole = self.share.region(leaf.shape)
            local = empty_array([len(positions) for positions in whole], leaf.expression.dtype)
            for place, (expression, region, sample) in enumerate(pieces):
                with self.around(sample), _at(sample):
                    local[place] = expression.read(region, part)
            return Slab(local, leaf.shape, leaf.checksum)

        return tree_map(finished, batch)

    def _pieces(self, leaf: Unread, indices: Sequence[Any]) -> Iterator[tuple[Expression, Any, Any]]:
        """The expressions that it is made of, each with its region and its sample; with the first sample where a batch
        was made otherwise than by stacking."""
        region = self.share.region(leaf.shape)
        if _is_stacked(leaf.expression):
            for part, sample in zip(leaf.expression.parts, indices, strict=True):  # type: ignore[attr-defined]
                yield part, region[1:], sample
        else:
            yield leaf.expression, region, indices[0]

    def _read_for(self, batch: Any, indices: Sequence[Any]) -> list[Sent]:
        pieces = list(self._every_piece(batch, indices))
        pieces += [(each.parent, self.slab(each), sample) for sample, each in self._unknown(batch, indices)]
        sent: dict[Any, Sent] = {}
        for expression, wanted, sample in pieces:
            with _at(sample):
                for need in expression.needs(wanted):
                    if need not in sent:
                        sent[need] = Sent.read(*need)
        return list(sent.values())

    def _samples(self, dataset: Any, indices: Any, known: Known | None) -> list[Any]:
        if getattr(dataset, "__getitems__", None):
            if known is not None:
                known.begin(*indices)
            with _at(list(indices)):
                return dataset.__getitems__(list(indices) if isinstance(indices, Order) else indices)
        samples = []
        for index in indices:
            if known is not None:
                known.begin(index)
            with self.around(index), _at(index):
                samples.append(dataset[index])
            renew()
        return samples


def _unread(leaf: Any) -> Any:
    if type(leaf) is not LazyTensor:
        return leaf
    if leaf.present is not None:
        return leaf.present
    return Unread(leaf.expression, tuple(leaf.shape), zlib.crc32("\n".join(leaf.expression.described()).encode()))


def _is_stacked(expression: Expression) -> bool:
    return isinstance(expression, Joined) and expression.stacked and not expression.dim


@contextlib.contextmanager
def _at(sample: Any) -> Iterator[None]:
    """A ReadError for an exception that a file is to blame for, with the sample; of several, the one that it says."""
    try:
        yield
    except Exception as error:
        found = as_read_error(error, sample)
        if found is None:
            raise
        raise found from error


class WorkerStart:
    """The first function of a worker process: prepares it for reading, and calls the program's own function."""

    def __init__(self, fetch: Fetching, start: Callable[[int], None] | None) -> None:
        self._fetch, self._start = fetch.of_a_worker(), start

    def __call__(self, worker: int) -> None:
        _MapDatasetFetcher.fetch = fetched_by(self._fetch)  # type: ignore[method-assign]
        if self._start is not None:
            self._start(worker)


_plain = _MapDatasetFetcher.fetch


def fetched_by(fetch: Fetching) -> Callable[[Any, Any], Any]:
    """The method `fetch` of torch's _MapDatasetFetcher with which DataLoaders fetch their batches by `fetch`."""

    def fetched(fetcher: Any, indices: Any) -> Any:
        return fetch(fetcher, indices) if fetcher.auto_collation else _plain(fetcher, indices)

    return fetched


@dataclass(frozen=True)
class Unread:
    """A rank's part of a batch, `shape` (samples, ...) without the cuts; `checksum` as in `Slab`."""

    expression: Expression
    shape: tuple[int, ...]
    checksum: int


@dataclass(frozen=True)
class Sent:
    """A region of an array, read by a worker process, on its way in memory that both see."""

    source: Source
    region: Region
    content: Tensor
    dtype: numpy.dtype[Any]

    @classmethod
    def read(cls, source: Source, region: Region) -> Sent:
        array = numpy.ascontiguousarray(source.read(region))
        return cls(source, region, torch.from_numpy(array.reshape(-1).view(numpy.uint8)), array.dtype)

    def array(self) -> numpy.ndarray:
        array = self.content.numpy().view(self.dtype).reshape([len(positions) for positions in self.region])
        array.flags.writeable = False
        return array


@dataclass(frozen=True)
class Draft:
    """A batch made of samples `indices`, with `Unread` leaves, and what has been read for it already."""

    batch: Any
    indices: Sequence[Any]
    parts: Sequence[Sent]
    found: Sequence[tuple[Any, str, Any]] = ()
    """Of statistics that are known, the index of the sample, the digest and the value."""

    def pin_memory(self, device: Any = None) -> Draft:
        return self


class Order(list[Any]):
    """Indices of samples, whether a worker is to read what they are made of, and what is known of their statistics."""

    def __init__(self, indices: Sequence[Any], *, read: bool, known: Mapping[str, Any]) -> None:
        super().__init__(indices)
        self.read, self.known = read, known


Part = Callable[[Source, Region], numpy.ndarray]
