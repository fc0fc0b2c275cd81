"""Places for storages that have left the device: a file, or pinned memory of the host."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 27  # Bytes that are pinned at once, or more where one storage is larger: to pin memory takes milliseconds.

ALIGNED = 4096  # Blocks of pinned memory begin at multiples of so many bytes.


class StoragePlace:
    """The place of storages that have left the device. This one keeps nothing: it is for storages without numbers.

    Attributes:
        is_beside: whether copies go on beside what the device computes, until `finish`.
    """

    is_beside = False

    def write(self, storage: torch.UntypedStorage, stream: Any) -> Any:
        """Writes a storage's contents and returns a key to read them by. ``stream``: in which they were computed."""
        return 0

    def read(self, key: Any, storage: torch.UntypedStorage) -> None:
        """Fills a storage of the same size."""

    def drop(self, key: Any, size: int) -> None:
        """Forgets the contents of a key."""

    def stream(self, storage: torch.UntypedStorage) -> Any:
        """The stream in which this thread computes on the storage's device; None where there are no streams."""
        return None

    def finish(self, key: Any, stream: Any) -> None:
        """Lets all work of a stream, and of this thread's, from now on wait for the last copy of a key."""


class File(StoragePlace):
    """A file without a name, for storages of a CPU."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="distconv-parts-")  # noqa: SIM115
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # The places that are no longer needed, by size.

    def write(self, storage: torch.UntypedStorage, stream: Any) -> int:
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


class _Block:
    """A piece of pinned memory; ``copied``: when the last copy from or to it ends."""

    __slots__ = ("bytes", "copied")

    def __init__(self, bytes: Tensor) -> None:
        self.bytes = bytes
        self.copied: torch.cuda.Event | None = None


class Pinned(StoragePlace):
    """Pinned memory of the host, for storages of a GPU.

    Copies run in two streams, one for each direction, beside computation. Copies from and to one block are in order,
    whatever storages it had before.
    """

    is_beside = True

    def __init__(self) -> None:
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)
        self._chunk = torch.empty(0, dtype=torch.uint8)  # The unused rest of the memory that was pinned last.
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def write(self, storage: torch.UntypedStorage, stream: torch.cuda.Stream) -> _Block:
        size = storage.nbytes()
        block = self._free[size].pop() if self._free[size] else self._new(size)
        self._copy(block, block.bytes, _bytes(storage), stream, 0)
        return block

    def read(self, key: _Block, storage: torch.UntypedStorage) -> None:
        self._copy(key, _bytes(storage), key.bytes, self.stream(storage), 1)

    def drop(self, key: _Block, size: int) -> None:
        self._free[size].append(key)

    def stream(self, storage: torch.UntypedStorage) -> torch.cuda.Stream:
        return torch.cuda.current_stream(storage.device)

    def finish(self, key: _Block, stream: torch.cuda.Stream) -> None:
        assert key.copied is not None
        for each in {stream, torch.cuda.current_stream(stream.device)}:
            each.wait_event(key.copied)

    def _new(self, size: int) -> _Block:
        room = -(-size // ALIGNED) * ALIGNED
        if len(self._chunk) < room:  # torch would round the size up to a power of two, and leave the rest unused
            self._chunk = torch.empty(max(CHUNK, 1 << (room - 1).bit_length()), dtype=torch.uint8, pin_memory=True)
        bytes, self._chunk = self._chunk[:size], self._chunk[room:]
        return _Block(bytes)

    def _copy(self, block: _Block, to: Tensor, source: Tensor, computes: torch.cuda.Stream, way: int) -> None:
        """Copies in the stream of one way, after all work so far and after the block's last copy."""
        device = computes.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        stream = self._streams[device][way]
        for each in {computes, torch.cuda.current_stream(device)}:
            stream.wait_stream(each)
        if block.copied is not None:
            stream.wait_event(block.copied)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            block.copied = stream.record_event()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
