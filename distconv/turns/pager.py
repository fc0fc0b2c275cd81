"""Keeps the tensors of parts within a limit of memory: those not read for longest leave the device until they are read.

Every tensor that an operator makes in a part is known here by its storage. A storage that leaves is written to a file,
or from a GPU to pinned memory of the host, and becomes empty; all tensors and views that share it stay what they are.
It is filled again before the next operator that reads it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from distconv.turns.heap import Excess
from distconv.turns.pages import Page, Paged
from distconv.turns.places import File, Pinned, StoragePlace
from distconv.turns.tape import is_copied, least_within
from mucudnn.process import renewed

AHEAD = 16  # One part in so many of the limit, of the storages that leave next, is written before they have to leave.


class Pager:
    """The storages of all parts on one kind of device, for calls in any number of threads.

    Attributes:
        resident, most: bytes that are there, and the most that were.
        written, read: bytes that have left, and return.
        away: bytes that have left, of storages that are still referenced.
    """

    has_numbers = True  # Whether the tensors have numbers; else only their sizes are followed.

    def __init__(self, device_type: str) -> None:
        self._lock = renewed(threading.RLock())
        self._gone: deque[tuple[int, Page]] = deque()
        """Pages whose storages were freed: a garbage collection may free them at any point of what changes the rest."""
        self._away, self._resident, self.most, self.written, self.read = 0, 0, 0, 0, 0
        self._pages: dict[int, Page] = {}
        self._here: OrderedDict[int, None] = OrderedDict()
        """The keys of those that are on the device, the one read last at the end."""
        self._place: StoragePlace = Pinned() if device_type == "cuda" else File()
        self._device_type = device_type
        self._excess = Excess() if device_type == "cpu" else None

    def new_call(self, limit: int, kind: Hashable) -> Paged:
        """Notes that a call begins. ``kind``: see `Paged`."""
        with self._lock:
            if self._excess is not None:
                self._excess.begin()
        return Paged(limit, kind if self._place.is_beside else None)

    @property
    def resident(self) -> int:
        self._forget_gone()
        return self._resident

    @property
    def away(self) -> int:
        self._forget_gone()
        return self._away

    def begin(self, keys: Sequence[int], changes: bool, call: Paged, copied: int = 0) -> dict[int, Page]:
        """An operator is to read some storages, and may change them: they are there from now until `end`, and returned.

        ``copied``: the bytes of the first one if the operator can compute in a copy of all of it. If both exceed the
        limit, that one is off the device instead, for `copy_of`, and not returned.
        """
        with self._lock:
            self._forget_gone()
            used = {key: page for key in keys if (page := self._pages.get(key)) is not None}
            page = used.get(keys[0]) if copied else None
            if page is not None and page.size == copied and is_copied(copied, page.users, call.limit):
                del used[keys[0]]
                self._leave(keys[0], page)
                self._fit(call.limit, page.size)
                self.read += page.size
            for key, page in used.items():
                page.users += 1
                if not page.away:
                    self._here.move_to_end(key)
            for key, page in used.items():
                if page.away:
                    self._copy_back(key, page, call.limit)
            returning = [page for page in used.values() if page.returns]
            for page in used.values() if changes else returning:
                self._finish(page)
            if returning:
                room = call.limit // 2 - sum(page.size for page in used.values())
                self._fetch_ahead(call.next_of(returning), call.limit, room)
            for page in used.values():
                if changes and page.key is not None:
                    self._place.drop(page.key, page.size)
                    page.key = None
            return used

    def copy_of(self, x: Tensor) -> Tensor | None:
        """A copy of a tensor that fills its storage, if that is off the device after `begin`; it stays so."""
        with self._lock:
            page = self._pages.get(x.untyped_storage()._cdata)
            if page is None or not page.away or not self.has_numbers:
                return None
            copy = torch.empty_like(x)
            self._place.read(page.key, copy.untyped_storage())
            self._place.finish(page.key, self._place.stream(copy.untyped_storage()))
            return copy

    def end(self, results: Iterable[Tensor], given: Sequence[int], used: dict[int, Page], call: Paged) -> None:
        """The operator has made ``results``: those in new storages may leave from now on. ``given``: the keys of the
        storages of its inputs."""
        with self._lock:
            self._forget_gone()
            made, least = 0, least_within(call.limit)
            for x in results:
                storage = x.untyped_storage()
                key = storage._cdata
                if key in given or key in self._pages or storage.nbytes() < least or not self._may_leave(storage):
                    continue
                page = self._pages[key] = used[key] = call.made(storage, self._place.stream(storage))
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

    def finish_all(self) -> None:
        """Lets all operators from now on wait for all copies."""
        with self._lock:
            for page in list(self._pages.values()):
                self._finish(page)

    def release(self, x: Tensor) -> None:
        """A tensor of the parts is the caller's from now on: it is on the device, and does not leave it any more."""
        with self._lock, torch._C.DisableTorchFunction():  # else it would be copied, as one that is handed out
            self._forget_gone()
            key = x.untyped_storage()._cdata
            page = self._pages.get(key)
            if page is not None:
                self._release(key, page)

    def _release(self, key: int, page: Page) -> None:
        if page.away:
            self._copy_back(key, page, limit=None)
        self._finish(page)
        self._freed(key, page)

    def release_all(self, call: Paged) -> None:
        """All tensors that are left of a call are the caller's from now on."""
        with self._lock:
            self._forget_gone()
            for key in call.keys:
                page = self._pages.get(key)
                if page is not None and page.storage() is not None:
                    self._release(key, page)

    def _copy_back(self, key: int, page: Page, limit: int | None) -> None:
        """Fills a storage again; others leave for it within ``limit``, if there is one."""
        storage = page.storage()
        assert storage is not None
        if limit is not None:
            self._fit(limit, page.size)
        self._fill(page, storage)
        page.away, page.stream = False, self._place.stream(storage)
        self._copied(page, storage, returns=True)
        self._away -= page.size
        self.read += page.size
        self._count(key, page.size)

    def _fetch_ahead(self, page: Page | None, limit: int, room: int) -> None:
        """Begins to copy back the storage that is read next, if it fits into the room."""
        storage = None if page is None else page.storage()
        if page is not None and storage is not None and page.away and page.size <= room:
            self._copy_back(storage._cdata, page, limit)

    def _copied(self, page: Page, storage: torch.UntypedStorage, returns: bool = False) -> None:
        """A copy of a page has begun, and may go on until `_finish`."""
        if self._place.is_beside:
            page.copied, page.returns = storage, returns

    def _finish(self, page: Page) -> None:
        """Lets all operators from now on wait for a page's copy."""
        if page.copied is not None:
            self._place.finish(page.key, page.stream)
            page.copied, page.returns = None, False

    def _write(self, page: Page, storage: torch.UntypedStorage) -> None:
        if page.key is None:
            page.key = self._place.write(storage, page.stream)
            self.written += page.size
            self._copied(page, storage)

    def _fit(self, limit: int, more: int = 0) -> None:
        """Lets unused storages leave, those read longest ago first, until ``more`` bytes fit."""
        if self._resident + more <= limit:
            return
        ahead = limit // AHEAD if self._place.is_beside else 0
        for key in list(self._here):  # of keys alone: pairs may set off a garbage collection, which frees pages
            page = self._pages.get(key)
            if page is None or page.users:
                continue
            storage = page.storage()
            if storage is None:
                continue
            if self._resident + more <= limit:
                ahead -= page.size
                if ahead < 0:
                    return
                self._write(page, storage)
                continue
            self._leave(key, page)

    def _leave(self, key: int, page: Page) -> None:
        """Lets a storage leave the device, if it is there."""
        storage = page.storage()
        if page.away or storage is None:
            return
        self._write(page, storage)
        self._finish(page)
        self._empty(storage)
        page.away = True
        del self._here[key]
        self._resident -= page.size
        self._away += page.size

    def _may_leave(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == self._device_type and storage.resizable()

    def _fill(self, page: Page, storage: torch.UntypedStorage) -> None:
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

    def _freed(self, key: int, page: Page) -> None:
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
    replacement: Pager | None = None


_thread = _Thread()


def pager_of(device_type: str) -> Pager:
    """The pager of a kind of device."""
    if _thread.replacement is not None and device_type == "cpu":
        return _thread.replacement
    with _making:
        if device_type not in _pagers:
            _pagers[device_type] = Pager(device_type)
        return _pagers[device_type]


@contextlib.contextmanager
def pager_replaced(pager: Pager) -> Iterator[None]:
    """A context in which calls of this thread use ``pager`` on a processor."""
    before, _thread.replacement = _thread.replacement, pager
    try:
        yield
    finally:
        _thread.replacement = before
