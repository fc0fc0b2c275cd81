"""A rank's samples of a batch, made by the Dataset and read as far as they are the rank's part."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data._utils import fetch as fetching

from distconv.reading.expression import Expression, Joined, empty
from distconv.reading.fault import ReadError, as_read_error
from distconv.reading.interception import lazily, renew
from distconv.reading.share import Share
from distconv.reading.source import Source
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


class Fetching:
    """Stands in for what makes a batch of a Dataset with indices. It can be sent to a worker process."""

    def __init__(self, share: Share) -> None:
        self.share = share

    def __call__(self, fetcher: Any, indices: Any) -> Any:
        try:
            with lazily():
                samples = _samples(fetcher.dataset, indices)
                with _at(indices):
                    batch = fetcher.collate_fn(samples)
                return self._finished(batch, indices)
        except ReadError as error:
            return Fault(str(error))

    def _finished(self, batch: Any, indices: Sequence[Any]) -> Any:
        def finished(leaf: Any) -> Any:
            if type(leaf) is not LazyTensor:
                return leaf
            if leaf.present is not None:
                return leaf.present
            told = zlib.crc32("\n".join(leaf.expression.tells()).encode())
            return Slab(self._read(leaf.expression, indices), tuple(leaf.shape), told)

        return tree_map(finished, batch)

    def _read(self, expression: Expression, indices: Sequence[Any]) -> Tensor:
        region = self.share.region(expression.shape)
        if not (isinstance(expression, Joined) and expression.stacked and not expression.dim):
            with _at(list(indices)):
                return expression.read(region, Source.read)
        local = empty([len(positions) for positions in region], expression.dtype)
        for place, (part, sample) in enumerate(zip(expression.parts, indices, strict=True)):
            with _at(sample):
                local[place] = part.read(region[1:], Source.read)
        return local


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


def _samples(dataset: Any, indices: Sequence[Any]) -> list[Any]:
    if getattr(dataset, "__getitems__", None):
        with _at(list(indices)):
            return dataset.__getitems__(indices)
    samples = []
    for index in indices:
        with _at(index):
            samples.append(dataset[index])
        renew()
    return samples


class WorkerStart:
    """What a worker process runs first: the program's own function, after it has learnt how to read."""

    def __init__(self, fetch: Fetching, start: Callable[[int], None] | None) -> None:
        self._fetch, self._start = fetch, start

    def __call__(self, worker: int) -> None:
        install(self._fetch)
        if self._start is not None:
            self._start(worker)


_plain = fetching._MapDatasetFetcher.fetch


def install(fetch: Fetching | None) -> None:
    """Lets the DataLoaders of this process fetch by `fetch`; None lets them do as ever."""

    def fetched(fetcher: Any, indices: Any) -> Any:
        return fetch(fetcher, indices) if fetch is not None and fetcher.auto_collation else _plain(fetcher, indices)

    fetching._MapDatasetFetcher.fetch = _plain if fetch is None else fetched  # type: ignore[method-assign]
