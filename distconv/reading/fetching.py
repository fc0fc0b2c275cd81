"""A rank's samples of a batch, made by the Dataset and read as far as they are the rank's part."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data._utils import fetch as fetching

from distconv.reading.draft import Draft, Order, Part, Sent, Unread
from distconv.reading.expression import Expression, Joined, empty
from distconv.reading.fault import ReadError, as_read_error
from distconv.reading.interception import lazily, renew
from distconv.reading.share import Share
from distconv.reading.source import Keeper, Source
from distconv.reading.tensor import LazyTensor


@dataclass(frozen=True)
class Slab:
    """A rank's part of a batch of its samples, `shape` (samples, ...) without the cuts.

    Attributes:
        local: what was read.
        told: a checksum of what files and which part of them the samples are made of.
    """

    local: Tensor
    shape: tuple[int, ...]
    told: int

    def pin_memory(self, device: Any = None) -> Slab:
        return Slab(self.local.pin_memory(), self.shape, self.told)


@dataclass(frozen=True)
class Fault:
    """A batch that cannot be read: the line that says why."""

    line: str


Around = Callable[[Any], contextlib.AbstractContextManager[Any]]
"""What is entered while the sample of an index is made or read."""


class Fetching:
    """Stands in for what makes a batch of a Dataset with indices. It can be sent to a worker process.

    With `drafts` a batch is a `Draft`; a worker reads for it what it was ordered to read, and in the script's own
    process nothing is read. `keeper` and `around` are for the samples that this process makes.
    """

    def __init__(self, share: Share, *, drafts: bool = False) -> None:
        self.share, self._drafts = share, drafts
        self.begin: Callable[[], None] | None = None
        self.keeper: Keeper | None = None
        self.around: Around = contextlib.nullcontext

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "begin": None, "keeper": None, "around": contextlib.nullcontext}

    def of_a_worker(self) -> Fetching:
        """The same, without what belongs to the script's own process."""
        return Fetching(self.share, drafts=self._drafts)

    def __call__(self, fetcher: Any, indices: Any) -> Any:
        if self.begin is not None:
            self.begin()
        try:
            with lazily(self.keeper):
                samples = self._samples(fetcher.dataset, indices)
                with self.around(indices[0]), _at(indices):
                    batch = fetcher.collate_fn(samples)
                unread = tree_map(_unread, batch)
                if not self._drafts:
                    return self.finished(unread, indices, Source.read)
                reads = self.keeper is None and getattr(indices, "read", True)
                return Draft(unread, list(indices), self._read_for(unread, indices) if reads else ())
        except ReadError as error:
            return Fault(str(error))

    def finished(self, batch: Any, indices: Sequence[Any], part: Part) -> Any:
        """The batch with every `Unread` leaf read by `part`. ReadError where one cannot be read."""

        def finished(leaf: Any) -> Any:
            if not isinstance(leaf, Unread):
                return leaf
            pieces = list(self._pieces(leaf, indices))
            if not _is_stacked(leaf.expression):
                ((expression, region, sample),) = pieces
                with self.around(sample), _at(list(indices)):
                    return Slab(expression.read(region, part), leaf.shape, leaf.told)
            whole = self.share.region(leaf.shape)
            local = empty([len(positions) for positions in whole], leaf.expression.dtype)
            for place, (expression, region, sample) in enumerate(pieces):
                with self.around(sample), _at(sample):
                    local[place] = expression.read(region, part)
            return Slab(local, leaf.shape, leaf.told)

        return tree_map(finished, batch)

    def _pieces(self, leaf: Unread, indices: Sequence[Any]) -> Iterator[tuple[Expression, Any, Any]]:
        """Of what expressions, in which region, it is made, and of which sample each is; the first one's where a batch
        was made otherwise than by stacking."""
        region = self.share.region(leaf.shape)
        if _is_stacked(leaf.expression):
            for part, sample in zip(leaf.expression.parts, indices, strict=True):  # type: ignore[attr-defined]
                yield part, region[1:], sample
        else:
            yield leaf.expression, region, indices[0]

    def _read_for(self, batch: Any, indices: Sequence[Any]) -> list[Sent]:
        sent = []
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Unread):
                for expression, wanted, sample in self._pieces(leaf, indices):
                    with _at(sample):
                        sent += [Sent.read(*need) for need in expression.needs(wanted)]
        return sent

    def _samples(self, dataset: Any, indices: Any) -> list[Any]:
        if getattr(dataset, "__getitems__", None):
            with _at(list(indices)):
                return dataset.__getitems__(list(indices) if isinstance(indices, Order) else indices)
        samples = []
        for index in indices:
            with self.around(index), _at(index):
                samples.append(dataset[index])
            renew()
        return samples


def _unread(leaf: Any) -> Any:
    if type(leaf) is not LazyTensor:
        return leaf
    if leaf.present is not None:
        return leaf.present
    return Unread(leaf.expression, tuple(leaf.shape), zlib.crc32("\n".join(leaf.expression.tells()).encode()))


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
    """What a worker process runs first: the program's own function, after it has learnt how to read."""

    def __init__(self, fetch: Fetching, start: Callable[[int], None] | None) -> None:
        self._fetch, self._start = fetch, start

    def __call__(self, worker: int) -> None:
        install(self._fetch.of_a_worker())
        if self._start is not None:
            self._start(worker)


_plain = fetching._MapDatasetFetcher.fetch


def install(fetch: Fetching | None) -> None:
    """Lets the DataLoaders of this process fetch by `fetch`; None lets them do as ever."""

    def fetched(fetcher: Any, indices: Any) -> Any:
        return fetch(fetcher, indices) if fetch is not None and fetcher.auto_collation else _plain(fetcher, indices)

    fetching._MapDatasetFetcher.fetch = _plain if fetch is None else fetched  # type: ignore[method-assign]
