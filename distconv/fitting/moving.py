"""Moves tensors that autograd saves in some segments off the device until backward, to a file or to pinned memory."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from distconv.model.parameter_gathers import regathered
from distconv.tensors.dtensors import wrap_strided
from distconv.turns.heap import trim
from distconv.turns.places import File, Pinned, StoragePlace
from distconv.turns.tape import USUAL
from mucudnn.devices.process_memory import glibc
from mucudnn.process import renewed

GIVEN_BACK = 1 << 26  # Bytes that leave a processor's memory before free pages are given back: it takes milliseconds.

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: it is at version"
    " {now}; expected version {before}"
)


_writing = renewed(threading.Lock())  # All threads share a place.


def storage_place(device_type: str) -> StoragePlace:
    """Where storages of a kind of device are kept until backward: in each process a place of its own."""
    return _place(device_type, os.getpid())


@functools.lru_cache(maxsize=8)
def _place(device_type: str, process: int) -> StoragePlace:
    return Pinned() if device_type == "cuda" else File()


class _FreedPages:
    """Gives the pages of moved storages back to the system: glibc keeps freed blocks of up to 32 MiB."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, size: int) -> None:
        """So many bytes more were moved and freed."""
        self._bytes += size
        if self._bytes >= GIVEN_BACK and (library := glibc()) is not None:
            self._bytes = 0
            trim(library)


_freed = _FreedPages()


class _SavedStorage:
    """A storage of tensors that autograd has saved. It is on the device until `move`, and again from `tensor` on."""

    def __init__(self, storage: torch.UntypedStorage, place: StoragePlace) -> None:
        self.origin = weakref.ref(storage)
        self._here: torch.UntypedStorage | None = storage
        self._saved: list[tuple[Tensor, int]] = []  # Tensors in it, with their versions when they were saved.
        self._back: weakref.ref[torch.UntypedStorage] | None = None
        self._size, self._device, self._place, self._key = storage.nbytes(), storage.device, place, None

    def save(self, x: Tensor) -> None:
        """Notes a tensor in the storage that autograd saves."""
        if self._here is not None:
            self._saved.append((x, x._version))

    def move(self) -> None:
        """Writes the contents, once, and drops the storage; nothing where a saved tensor has been changed."""
        if self._here is not None and all(x._version == version for x, version in self._saved):
            stream = self._place.stream(self._here)
            with _writing:
                self._key = self._place.write(self._here, stream)
            self._place.finish(self._key, stream)
            weakref.finalize(self, self._place.drop, self._key, self._size).atexit = False
            self._here = None
            self._saved.clear()
            if self._device.type == "cpu":
                _freed.add(self._size)

    def tensor(self, dtype: torch.dtype, *geometry: Any) -> Tensor:
        """A saved tensor: in the storage, or in a new one with its contents, which all saved tensors of it share.
        RuntimeError where one was changed in place after it was saved, so that the storage was not moved."""
        for x, version in self._saved:
            _unchanged(x, version)
        storage = self._here or self.origin() or (self._back() if self._back else None)
        if storage is None:
            storage = torch.empty(self._size, dtype=torch.uint8, device=self._device).untyped_storage()
            self._place.read(self._key, storage)
            self._place.finish(self._key, self._place.stream(storage))
            self._back = weakref.ref(storage)
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *geometry)


class MovedTensors:
    """Moves tensors that autograd saves while a model is called, within contexts of `segment`. For one thread.

    ``stays``: tensors whose storages are kept anyway, parameters and inputs.
    """

    def __init__(self, device_type: str, stays: Iterable[Tensor]) -> None:
        self._place, self._device_type = storage_place(device_type), device_type
        with torch._C.DisableTorchFunction():  # else they would be copied, as tensors whose memory is handed out
            self._stays = {x.untyped_storage()._cdata for x in stays if x.layout == torch.strided}
        self._storages: dict[int, _SavedStorage] = {}
        self._waiting: list[_SavedStorage] = []  # Those of the last operator that saved within the segment.
        self._node = -1  # The number of the operator that saved them.
        self._inside = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A context for the call of the model."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda unpack: unpack()):
            try:
                yield
            finally:
                self._storages.clear()

    @contextlib.contextmanager
    def segment(self) -> Iterator[list[Tensor]]:
        """A context in which saved tensors are moved; those of the last operator stay if they are put into the list."""
        stays: list[Tensor] = []
        self._inside = True
        try:
            yield stays
        finally:
            self._inside = False
            self._move_waiting(lambda origin: origin is None or all(x.untyped_storage() is not origin for x in stays))

    def _pack(self, x: Tensor) -> Callable[[], Tensor]:
        gathered = regathered(x)
        if gathered is not None:
            return gathered
        if type(x) is DTensor:
            return functools.partial(_sharded, self._pack(x._local_tensor), x._spec)
        if not self._may_move(x):
            return functools.partial(_unchanged, x, x._version)
        storage = x.untyped_storage()
        saved = self._storages.get(storage._cdata)
        if saved is None or saved.origin() is not storage:
            saved = self._storages[storage._cdata] = _SavedStorage(storage, self._place)
        saved.save(x)
        if self._inside:
            # An operator may write to what it has saved, as `rrelu` does to its noise, after hooks were called.
            # So storages wait until another operator saves, which also shows that they are not the segment's result.
            node = torch._C._autograd._get_sequence_nr()
            if node != self._node:
                self._move_waiting(lambda origin: origin is not storage)
                self._node = node
            if saved not in self._waiting:
                self._waiting.append(saved)
        return functools.partial(saved.tensor, x.dtype, x.storage_offset(), x.size(), x.stride())

    def _move_waiting(self, may_move: Callable[[torch.UntypedStorage | None], bool]) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if may_move(each.origin()):
                each.move()

    def _may_move(self, x: Tensor) -> bool:
        if type(x) is not Tensor or x.layout != torch.strided or x.device.type != self._device_type:
            return False
        storage = x.untyped_storage()
        plain = not (x.is_conj() or x.is_neg())
        return plain and storage.nbytes() >= USUAL and storage._cdata not in self._stays


def _unchanged(x: Tensor, version: int) -> Tensor:
    """A saved tensor that stays. RuntimeError where it was changed in place after it was saved."""
    if x._version != version:
        raise RuntimeError(CHANGED.format(now=x._version, before=version))
    return x


def _sharded(unpack: Callable[[], Tensor], layout: DTensorSpec) -> Tensor:
    return wrap_strided(unpack(), layout.mesh, layout.placements, layout.shape, layout.stride)
