"""Places where storages are kept that have left the device: a file, or pinned memory of the host."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor


class Place(Protocol):
    """Where storages go that leave the device."""

    def write(self, storage: torch.UntypedStorage) -> Any:
        """Keeps what a storage holds; a key by which it is read."""

    def read(self, key: Any, storage: torch.UntypedStorage) -> None:
        """Fills a storage of the same size."""

    def drop(self, key: Any, size: int) -> None:
        """Forgets what was kept."""


class File:
    """A file without a name, for storages of a CPU."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="distconv-parts-")  # noqa: SIM115
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """By size: places that are no longer needed."""

    def write(self, storage: torch.UntypedStorage) -> int:
        size = storage.nbytes()
        free = self._free[size]
        at = free.pop() if free else self._end
        self._end = max(self._end, at + size)
        self._move(os.pwrite, storage, at)
        return at

    def read(self, key: int, storage: torch.UntypedStorage) -> None:
        self._move(lambda file, bytes, at: os.preadv(file, [bytes], at), storage, key)

    def drop(self, key: int, size: int) -> None:
        self._free[size].append(key)

    def _move(self, move: Any, storage: torch.UntypedStorage, at: int) -> None:
        bytes = memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
        done = 0
        while done < len(bytes):
            count = move(self._file.fileno(), bytes[done:], at + done)
            if not count:
                raise OSError(f"parts in turn: their file ended after {at + done} bytes")
            done += count


class Pinned:
    """Pinned memory of the host, for storages of a GPU; copies from and to one place go in order, in any streams."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._used: dict[int, torch.cuda.Event] = {}
        """By the address of a place: when its last copy ends."""

    def write(self, storage: torch.UntypedStorage) -> Tensor:
        size = storage.nbytes()
        free = self._free[size]
        kept = free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=True)
        if kept.data_ptr() in self._used:
            torch.cuda.current_stream(storage.device).wait_event(self._used[kept.data_ptr()])
        here, stream = _bytes(storage), torch.cuda.current_stream(storage.device)
        kept.copy_(here, non_blocking=True)
        here.record_stream(stream)  # the memory may be another stream's, which would reuse it before the copy has ended
        self._used[kept.data_ptr()] = stream.record_event()
        return kept

    def read(self, key: Tensor, storage: torch.UntypedStorage) -> None:
        stream = torch.cuda.current_stream(storage.device)
        stream.wait_event(self._used[key.data_ptr()])
        _bytes(storage).copy_(key, non_blocking=True)
        self._used[key.data_ptr()] = stream.record_event()

    def drop(self, key: Tensor, size: int) -> None:
        self._free[size].append(key)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
