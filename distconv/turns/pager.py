"""What the parts hold, within a limit of memory: what was not read for longest leaves the device until it is read.

Every tensor that an operator makes in a part is known here by its storage. A storage that leaves is written to a file,
or to pinned memory of the host where it is a GPU's, and becomes empty; all tensors and views that share it stay what
they are. It is filled again before the next operator that is given it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.turns.heap import Excess
from distconv.turns.places import File, Pinned, Place
from mucudnn.process.at_fork import renewed

LEAST = 1 << 16
"""Smaller storages stay, and are not counted."""


class _Page:
    """A storage; ``key``: where a copy of it is kept, if one is; ``users``: operators that run on it."""

    __slots__ = ("away", "key", "size", "storage", "users")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage, self.size = weakref.ref(storage), storage.nbytes()
        self.key: Any = None
        self.away, self.users = False, 0


class Paged:
    """A call of a model.

    Attributes:
        limit: the most bytes that are to be on the device while its operators run; more where one needs more.
        keys: of the storages that it has made.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.keys: set[int] = set()


class Pager:
    """The storages of all parts on one kind of device, for calls in any number of threads.

    Attributes:
        resident, most: bytes that are there, and the most that were.
        written, read: bytes that have left, and come back.
        away: bytes that have left, of storages that somebody still holds.
    """

    has_numbers = True
    """Whether the tensors have numbers; else only their sizes are followed."""

    def __init__(self, device_type: str) -> None:
        self._lock = renewed(threading.RLock())
        self._gone: deque[tuple[int, _Page]] = deque()
        """Pages whose storages were freed: a garbage collection may free them at any point of what changes the rest."""
        self._away, self._resident, self.most, self.written, self.read = 0, 0, 0, 0, 0
        self._pages: dict[int, _Page] = {}
        self._here: OrderedDict[int, None] = OrderedDict()
        """The keys of those that are on the device, the one read last at the end."""
        self._place: Place = Pinned() if device_type == "cuda" else File()
        self._device_type = device_type
        self._excess = Excess() if device_type == "cpu" else None

    def new_call(self, limit: int) -> Paged:
        """A call begins, at the end of which `release_all` may let its storages go."""
        with self._lock:
            if self._excess is not None:
                self._excess.begin()
        return Paged(limit)

    @property
    def resident(self) -> int:
        """See the class."""
        self._forget_gone()
        return self._resident

    @property
    def away(self) -> int:
        """See the class."""
        self._forget_gone()
        return self._away

    def begin(self, keys: Iterable[int], changes: bool, call: Paged) -> dict[int, _Page]:
        """An operator is to read some storages, and may change them: they are there from now until `end`."""
        with self._lock:
            return self._begin(keys, changes, call)

    def _begin(self, keys: Iterable[int], changes: bool, call: Paged) -> dict[int, _Page]:
        self._forget_gone()
        used = {}
        for key in keys:
            page = self._pages.get(key)
            if page is not None:
                used[key] = page
                if not page.away:
                    self._here.move_to_end(key)
        for page in used.values():
            page.users += 1
        for key, page in used.items():
            if page.away:
                self._bring(key, page, call.limit)
            if changes and page.key is not None:
                self._place.drop(page.key, page.size)
                page.key = None
        return used

    def end(self, results: Iterable[Tensor], given: Sequence[int], used: dict[int, _Page], call: Paged) -> None:
        """It has made some: those in storages of their own are the parts'. ``given``: the storages of its inputs."""
        with self._lock:
            self._end(results, given, used, call)

    def _end(self, results: Iterable[Tensor], given: Sequence[int], used: dict[int, _Page], call: Paged) -> None:
        self._forget_gone()
        made = 0
        for x in results:
            storage = x.untyped_storage()
            key = storage._cdata
            if key in given or key in self._pages or storage.nbytes() < LEAST or not self._may_leave(storage):
                continue
            page = self._pages[key] = used[key] = _Page(storage)
            page.users = 1
            call.keys.add(key)
            weakref.finalize(storage, self._gone.append, (key, page)).atexit = False
            self._count(key, page.size)
            made += page.size
        self._fit(call.limit)
        for page in used.values():
            page.users -= 1
        if made and self._excess is not None:
            self._excess.check(made, self._resident, call.limit)

    def release(self, x: Tensor) -> None:
        """A tensor leaves the parts: it is there from now on."""
        with self._lock:
            self._forget_gone()
            key = x.untyped_storage()._cdata
            page = self._pages.get(key)
            if page is not None:
                self._release(key, page)

    def _release(self, key: int, page: _Page) -> None:
        if page.away:
            self._bring(key, page, limit=None)
        self._freed(key, page)

    def release_all(self, call: Paged) -> None:
        """All that is left of a call is the caller's."""
        with self._lock:
            self._forget_gone()
            for key in call.keys:
                page = self._pages.get(key)
                if page is not None and page.storage() is not None:
                    self._release(key, page)

    def _bring(self, key: int, page: _Page, limit: int | None) -> None:
        """``limit``: None for what no longer counts."""
        storage = page.storage()
        assert storage is not None
        if limit is not None:
            self._fit(limit, page.size)
        self._fill(page, storage)
        page.away = False
        self._away -= page.size
        self.read += page.size
        self._count(key, page.size)

    def _fit(self, limit: int, more: int = 0) -> None:
        """Lets what was read longest ago leave, but nothing that an operator uses, until there is room."""
        if self._resident + more <= limit:
            return
        for key in list(self._here):  # of keys alone: pairs may set off a garbage collection, which frees pages
            page = self._pages.get(key)
            if page is None or page.users:
                continue
            storage = page.storage()
            if storage is None:
                continue
            if page.key is None:
                page.key = self._place.write(storage)
                self.written += page.size
            self._empty(storage)
            page.away = True
            del self._here[key]
            self._resident -= page.size
            self._away += page.size
            if self._resident + more <= limit:
                return

    def _may_leave(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == self._device_type and storage.resizable()

    def _fill(self, page: _Page, storage: torch.UntypedStorage) -> None:
        with torch.inference_mode(False), torch.no_grad():
            storage.resize_(page.size)
            self._place.read(page.key, storage)

    def _empty(self, storage: torch.UntypedStorage) -> None:
        with torch.inference_mode(False), torch.no_grad():
            storage.resize_(0)

    def _count(self, key: int, size: int) -> None:
        self._here[key] = None
        self._resident += size
        self.most = max(self.most, self._resident)

    def _forget_gone(self) -> None:
        with self._lock:
            while self._gone:
                self._freed(*self._gone.popleft())

    def _freed(self, key: int, page: _Page) -> None:
        if self._pages.get(key) is page:
            del self._pages[key]
            if page.away:
                self._away -= page.size
            else:
                del self._here[key]
                self._resident -= page.size
            if page.key is not None:
                self._place.drop(page.key, page.size)
                page.key = None


_pagers: dict[str, Pager] = {}


_making = renewed(threading.Lock())


class _Thread(threading.local):
    instead: Pager | None = None


_thread = _Thread()


def pager_of(device_type: str) -> Pager:
    """That of a kind of device."""
    if _thread.instead is not None and device_type == "cpu":
        return _thread.instead
    with _making:
        if device_type not in _pagers:
            _pagers[device_type] = Pager(device_type)
        return _pagers[device_type]


@contextlib.contextmanager
def instead(pager: Pager) -> Iterator[None]:
    """Within it that is the pager of processors, for calls of this thread."""
    before, _thread.instead = _thread.instead, pager
    try:
        yield
    finally:
        _thread.instead = before
