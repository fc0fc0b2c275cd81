"""What some segments keep for backward leaves the device until then, to a file or the host's pinned memory."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.tensors.dtensors import wrap_strided
from distconv.turns.huge_pages import trim
from distconv.turns.places import File, Pinned, StoragePlace
from distconv.turns.tape import LEAST
from mucudnn.devices.process_memory import glibc
from mucudnn.process.at_fork import renewed

GIVEN_BACK = 1 << 26  # Bytes that leave a processor's memory before free pages are given back: it takes milliseconds.

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: it is at version"
    " {now}; expected version {before}"
)


_writing = renewed(threading.Lock())  # A place is one for all threads.


def place_of(device_type: str) -> StoragePlace:
    """Where storages of a kind of device are kept meanwhile: not in a file that a forked process shares."""
    return _place(device_type, os.getpid())


@functools.lru_cache(maxsize=8)
def _place(device_type: str, process: int) -> StoragePlace:
    return Pinned() if device_type == "cuda" else File()


class _Freed:
    """Gives the pages of what has left back to the system: glibc keeps freed blocks of up to 32 MiB."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, size: int) -> None:
        """So many bytes have left."""
        self._bytes += size
        if self._bytes >= GIVEN_BACK and (library := glibc()) is not None:
            self._bytes = 0
            trim(library)


_freed = _Freed()


class _Page:
    """A storage that backward needs. It is here until `leave`, and again from the first `storage` on."""

    def __init__(self, storage: torch.UntypedStorage, place: StoragePlace) -> None:
        self.origin = weakref.ref(storage)
        self._here: torch.UntypedStorage | None = storage
        self._kept: list[tuple[Tensor, int]] = []  # What is kept of it, and at which version.
        self._back: weakref.ref[torch.UntypedStorage] | None = None
        self._size, self._device, self._place, self._key = storage.nbytes(), storage.device, place, None

    def keep(self, x: Tensor) -> None:
        """Backward needs a tensor in the storage."""
        if self._here is not None:
            self._kept.append((x, x._version))

    def check(self) -> None:
        """RuntimeError where a tensor has been changed in place since it was kept, and before it left."""
        for x, version in self._kept:
            if x._version != version:
                raise RuntimeError(CHANGED.format(now=x._version, before=version))

    def leave(self) -> None:
        """Writes the contents, once, and lets the storage go."""
        if self._here is not None and all(x._version == version for x, version in self._kept):
            stream = self._place.stream(self._here)
            with _writing:
                self._key = self._place.write(self._here, stream)
            self._place.finish(self._key, stream)
            weakref.finalize(self, self._place.drop, self._key, self._size).atexit = False
            self._here = None
            self._kept.clear()
            if self._device.type == "cpu":
                _freed.add(self._size)

    def storage(self) -> torch.UntypedStorage:
        """The storage, or another one with its contents, which all that ask for it share."""
        storage = self._here or self.origin() or (self._back() if self._back else None)
        if storage is None:
            storage = torch.empty(self._size, dtype=torch.uint8, device=self._device).untyped_storage()
            self._place.read(self._key, storage)
            self._place.finish(self._key, self._place.stream(storage))
            self._back = weakref.ref(storage)
        return storage


class Away:
    """What autograd keeps while a model is called; in `segment` it leaves the device. For one thread.

    ``stays``: tensors whose storages are kept anyway, parameters and inputs.
    """

    def __init__(self, device_type: str, stays: Iterable[Tensor]) -> None:
        self._place, self._device_type = place_of(device_type), device_type
        with torch._C.DisableTorchFunction():  # what watches the call would copy what it sees handed out
            self._stays = {x.untyped_storage()._cdata for x in stays if x.layout == torch.strided}
        self._pages: dict[int, _Page] = {}
        self._leaving: list[_Page] = []
        self._inside = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A context for the call of the model."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            try:
                yield
            finally:
                self._pages.clear()

    @contextlib.contextmanager
    def segment(self) -> Iterator[list[Tensor]]:
        """A context in which what is kept leaves, at its end all but what is put into the list."""
        stays: list[Tensor] = []
        self._inside = True
        try:
            yield stays
        finally:
            self._inside = False
            staying = {x.untyped_storage()._cdata for x in stays}
            for page in self._leaving:
                origin = page.origin()
                if origin is None or origin._cdata not in staying:
                    page.leave()
            self._leaving.clear()

    def _pack(self, x: Tensor) -> Any:
        if type(x) is DTensor:
            return _Sharded(self._pack(x._local_tensor), x._spec)
        if not self._may_leave(x):
            return x, x._version
        storage = x.untyped_storage()
        page = self._pages.get(storage._cdata)
        if page is None or page.origin() is not storage:
            page = self._pages[storage._cdata] = _Page(storage, self._place)
        page.keep(x)
        if self._inside and page not in self._leaving:
            for earlier in self._leaving:  # The last one may be the segment's result.
                earlier.leave()
            self._leaving = [page]
        return page, x.dtype, x.storage_offset(), x.size(), x.stride()

    def _may_leave(self, x: Tensor) -> bool:
        if type(x) is not Tensor or x.layout != torch.strided or x.device.type != self._device_type:
            return False
        storage = x.untyped_storage()
        plain = not (x.is_conj() or x.is_neg())
        return plain and storage.nbytes() >= LEAST and storage._cdata not in self._stays


class _Sharded(NamedTuple):
    """A DTensor: its local tensor, as it is kept, and its layout."""

    local: Any
    layout: Any


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _Sharded):
        layout = packed.layout
        return wrap_strided(_unpack(packed.local), layout.mesh, layout.placements, layout.shape, layout.stride)
    if len(packed) == 2:
        x, version = packed
        if x._version != version:
            raise RuntimeError(CHANGED.format(now=x._version, before=version))
        return x
    page, dtype, *geometry = packed
    page.check()
    storage = page.storage()
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *geometry)
