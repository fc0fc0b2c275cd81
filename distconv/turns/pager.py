"""What the parts hold, within a limit of memory: what was not read for longest leaves the device until it is read.

Every tensor that an operator makes in a part is known here by its storage. A storage that leaves is written to a file,
or to pinned memory of the host where it is a GPU's, and becomes empty; all tensors and views that share it stay what
they are. It is filled again before the next operator that is given it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from distconv.tensors.deferred import Deferred
from distconv.turns.heap import Excess
from distconv.turns.places import File, Pinned, Place

LEAST = 1 << 16
"""Smaller storages stay, and are not counted."""


class _Page:
    """A storage; ``key``: where a copy of it is kept, if one is."""

    __slots__ = ("away", "key", "size", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage, self.size = weakref.ref(storage), storage.nbytes()
        self.key: Any = None
        self.away = False


class Pager:
    """The storages of all parts on one kind of device.

    Attributes:
        limit: the most bytes that are to be on the device; more where one operator needs more.
        resident, most: bytes that are there, and the most that were.
        written, read: bytes that have left, and come back.
        away: bytes that have left, of storages that somebody still holds.
    """

    has_numbers = True
    """Whether the tensors have numbers; else only their sizes are followed."""

    def __init__(self, device_type: str) -> None:
        self.away = 0
        self.limit, self.resident, self.most, self.written, self.read = 0, 0, 0, 0, 0
        self._pages: dict[int, _Page] = {}
        self._here: OrderedDict[int, None] = OrderedDict()
        """The keys of those that are on the device, the one read last at the end."""
        self._place: Place = Pinned() if device_type == "cuda" else File()
        self._device_type = device_type
        self._of_call: set[int] = set()
        self._excess = Excess() if device_type == "cpu" else None

    def new_call(self) -> None:
        """A call begins, at the end of which `release_all` may let its storages go."""
        self._of_call.clear()
        if self._excess is not None:
            self._excess.begin()

    def begin(self, keys: Iterable[int], changes: bool) -> dict[int, _Page]:
        """An operator is to read some storages, and may change them: they are there when this returns."""
        used = {}
        for key in keys:
            page = self._pages.get(key)
            if page is not None:
                used[key] = page
                if not page.away:
                    self._here.move_to_end(key)
        for key, page in used.items():
            if page.away:
                self._bring(key, page, used)
            if changes and page.key is not None:
                self._place.drop(page.key, page.size)
                page.key = None
        return used

    def end(self, results: Iterable[Tensor], given: Sequence[int], used: dict[int, _Page]) -> None:
        """It has made some: those in storages of their own are the parts'. ``given``: the storages of its inputs."""
        made = 0
        for x in results:
            storage = x.untyped_storage()
            key = storage._cdata
            if key in given or key in self._pages or storage.nbytes() < LEAST or not self._may_leave(storage):
                continue
            page = self._pages[key] = used[key] = _Page(storage)
            self._of_call.add(key)
            weakref.finalize(storage, self._freed, key, page).atexit = False
            self._count(key, page.size)
            made += page.size
        self._fit(used)
        if made and self._excess is not None:
            self._excess.check(made, self.resident, self.limit)

    def release(self, x: Tensor) -> None:
        """A tensor leaves the parts: it is there from now on."""
        key = x.untyped_storage()._cdata
        page = self._pages.get(key)
        if page is not None:
            self._release(key, page)

    def _release(self, key: int, page: _Page) -> None:
        if page.away:
            self._bring(key, page, {key: page})
        self._freed(key, page)

    def release_all(self) -> None:
        """All that is left of the call is the caller's."""
        for key in self._of_call:
            page = self._pages.get(key)
            if page is not None and page.storage() is not None:
                self._release(key, page)

    def _bring(self, key: int, page: _Page, used: dict[int, _Page]) -> None:
        storage = page.storage()
        assert storage is not None
        self._fit(used, page.size)
        self._fill(page, storage)
        page.away = False
        self.away -= page.size
        self.read += page.size
        self._count(key, page.size)

    def _fit(self, used: dict[int, _Page], more: int = 0) -> None:
        """Lets what was read longest ago leave, but nothing that an operator uses, until there is room."""
        if self.resident + more <= self.limit:
            return
        for key in list(self._here):  # of keys alone: pairs may set off a garbage collection, which frees pages
            page = self._pages.get(key)
            if page is None or key in used:
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
            self.resident -= page.size
            self.away += page.size
            if self.resident + more <= self.limit:
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
        self.resident += size
        self.most = max(self.most, self.resident)

    def _freed(self, key: int, page: _Page) -> None:
        if self._pages.get(key) is page:
            del self._pages[key]
            if page.away:
                self.away -= page.size
            else:
                del self._here[key]
                self.resident -= page.size
            if page.key is not None:
                self._place.drop(page.key, page.size)
                page.key = None


class Paging(TorchDispatchMode):
    """While it is on in a part's thread, a pager sees all operators on plain tensors."""

    def __init__(self, pager: Pager) -> None:
        super().__init__()
        self.pager = pager

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types:
            if any(issubclass(kind, _TAKEN_APART) for kind in types):
                return NotImplemented  # what is beneath comes by itself
            if self.pager.has_numbers and any(issubclass(kind, FakeTensor) for kind in types):
                return func(*args, **kwargs)
        if func in _READS_NOTHING:
            return func(*args, **kwargs)
        keys = [x.untyped_storage()._cdata for x in _tensors((*args, *kwargs.values()))]
        used = self.pager.begin(keys, func._schema.is_mutable)
        result = func(*args, **kwargs)
        self.pager.end(_tensors((result,)), keys, used)
        return result


_TAKEN_APART = DTensor, Deferred

_aten = torch.ops.aten
_READS_NOTHING = {_aten.detach.default, _aten.alias.default, _aten.view.default, torch.ops.prim.device.default}
"""Operators that accept an empty storage. Tensors without numbers are asked for their device by one, others are not."""


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.layout == torch.strided:  # others have no storage of their own
                found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


_pagers: dict[str, Pager] = {}


def pager_of(device_type: str, limit: int) -> Pager:
    """That of a kind of device, with a limit from now on."""
    if device_type not in _pagers:
        _pagers[device_type] = Pager(device_type)
    _pagers[device_type].limit = limit
    return _pagers[device_type]


@contextlib.contextmanager
def instead(pager: Pager) -> Iterator[None]:
    """Within it that is the pager of processors."""
    kept = dict(_pagers)
    _pagers["cpu"] = pager
    try:
        yield
    finally:
        _pagers.clear()
        _pagers.update(kept)
