"""Store: the parts of arrays that a rank has read and keeps in memory, by the identities of their samples."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

import numpy

from distconv.reading.source import Source
from distconv.reading.view import Region

Key = tuple[Source, Region | str]  # An array in a file, and its region; or the text of an index that was read at once.

_Stamp = tuple[int, ...] | None


class PartStore:
    """Parts of arrays in files, kept until the process ends.

    A part is kept when the first batch with its sample has been made, by the rank that owns the sample. What a sample
    reads anew each time, such as crops whose place is drawn, is given up when it turns out to be so. A part is an
    answer only while its file is the one that it was read from.

    Attributes:
        limit: the most bytes of parts that are kept.
        bytes: how many are.
        bytes_read: of all that was read from files.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = self.bytes_read = 0
        self._parts: dict[Key, tuple[_Stamp, Any]] = {}
        self._of: dict[Sample, set[Key]] = {}
        self._received: dict[Key, Any] = {}
        self._asked: dict[Sample, dict[Key, tuple[_Stamp, Any]]] = {}
        self._sample: Sample | None = None

    @contextlib.contextmanager
    def of(self, sample: Sample) -> Iterator[None]:
        """A context in which requested parts belong to this sample."""
        before, self._sample = self._sample, sample
        try:
            yield
        finally:
            self._sample = before

    def part(self, source: Source, wanted: Region) -> numpy.ndarray:
        """A region of an array in a file, not to be written to."""

        def read() -> numpy.ndarray:
            array = source.read(wanted)
            array.flags.writeable = False
            return array

        return self._answer((source, wanted), read)

    def small(self, source: Source, index: str, read: Callable[[], Any]) -> Any:
        """The result of `read`: the elements of an array that `index` chooses. Only numbers and arrays are kept."""
        found = self._answer((source, f"[{index}]"), read)
        return found.copy() if isinstance(found, numpy.ndarray) else found

    def _answer(self, key: Key, read: Callable[[], Any]) -> Any:
        stamp = key[0].stamp()
        array = self._received.get(key)
        if array is None:
            kept = self._parts.get(key)
            array = kept[1] if kept is not None and kept[0] == stamp else self._just_asked(key, stamp)
        if array is None:
            array = read()
            if not isinstance(array, numpy.generic) and type(array) is not numpy.ndarray:
                return array
            self.bytes_read += array.nbytes
        if self._sample is not None:
            self._asked.setdefault(self._sample, {})[key] = (stamp, array)
        return array

    def _just_asked(self, key: Key, stamp: _Stamp) -> Any:
        """The part, if the batch that is being made has asked for it already."""
        found = (asked[key] for asked in self._asked.values() if key in asked)
        return next((array for before, array in found if before == stamp), None)

    def add(self, parts: Iterable[tuple[Key, Any]]) -> None:
        """Parts that others have read for the batch that is made next."""
        self._received.update(parts)

    def asked(self) -> tuple[int, Source | None]:
        """The bytes of the parts of the batch that is being made, and the array from which the largest part is."""
        parts = [(array.nbytes, key[0]) for asked in self._asked.values() for key, (_, array) in asked.items()]
        return sum(size for size, _ in parts), max(parts, key=lambda part: part[0])[1] if parts else None

    def end_batch(self, owned: Collection[Sample]) -> None:
        """Keeps what the batch that has been made asked for, of the samples that are this rank's to keep."""
        for sample, asked in self._asked.items():
            if sample not in owned:
                continue
            keys = self._of.setdefault(sample, set(asked))
            if keys.isdisjoint(asked):
                self._give_up(keys)
            for key, (stamp, array) in asked.items():
                if key in keys:
                    self._keep(key, stamp, array)
        self.drop_batch()

    def drop_batch(self) -> None:
        """Forgets what was asked and read for a batch."""
        self._asked, self._received = {}, {}

    def _give_up(self, keys: set[Key]) -> None:
        for key in keys:
            if (kept := self._parts.pop(key, None)) is not None:
                self.bytes -= kept[1].nbytes
        keys.clear()

    def _keep(self, key: Key, stamp: _Stamp, array: Any) -> None:
        """Keeps a part, as far as the limit allows."""
        kept = self._parts.get(key)
        freed = 0 if kept is None else kept[1].nbytes
        if (kept is not None and kept[0] == stamp) or self.bytes - freed + array.nbytes > self.limit:
            return
        # A copy of its own: of a larger array, or of memory that a worker shares, only this is kept.
        own = array if array.base is None else numpy.array(array)
        if isinstance(own, numpy.ndarray):
            own.flags.writeable = False
        self._parts[key] = (stamp, own)
        self.bytes += own.nbytes - freed

    def parts_of(self, samples: Iterable[Sample]) -> list[tuple[Key, Any]]:
        """The kept parts of these samples whose files have not changed."""
        found = []
        for sample in samples:
            for key in self._of.get(sample, ()):
                kept = self._parts.get(key)
                if kept is not None and kept[0] == key[0].stamp():
                    found.append((key, kept[1]))
        return found


Sample = tuple[int, Hashable]  # The number of a data set, and the index of one of its samples.


class Numbers:
    """Numbers of data sets, in the order in which they are read."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self._count = itertools.count()

    def __call__(self, dataset: Any) -> int:
        known = self._numbers.get(id(dataset))
        if known is None or known[0]() is not dataset:
            try:
                reference: Callable[[], Any] = weakref.ref(dataset)
            except TypeError:
                reference = lambda: dataset  # noqa: E731
            known = self._numbers[id(dataset)] = reference, next(self._count)
        return known[1]


def sample(number: int, index: Any) -> Sample:
    """The identity of a sample of a data set."""
    known: Hashable = index if isinstance(index, int | str) else repr(index)
    return number, known
