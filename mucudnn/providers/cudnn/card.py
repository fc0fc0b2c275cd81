"""A GPU of this process (`Card`), with one cuDNN handle for each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import c_void_p

import torch

from mucudnn.devices.gpu import current_device, empty_strided
from mucudnn.process import renewed
from mucudnn.providers.cudnn.graph import PlannedCard
from mucudnn.providers.cudnn.library import Library, library

_BYTE = torch.uint8


class Card:
    """A GPU as cuDNN knows it."""

    def __init__(self, index: int) -> None:
        """
        Raises:
            Unavailable: where cuDNN cannot be used.
            CudnnError: where it does not take the GPU.
        """
        self.library: Library = library()  # cuDNN.
        self.index = index  # CUDA's number of the GPU.
        self._lock = renewed(threading.Lock())
        self._free: list[c_void_p] = []
        self._mine = threading.local()
        self._here = nullcontext()
        self._planning = renewed(threading.Lock())
        self._current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        with torch.cuda.device(index):
            # A handle of its own: any thread may plan, and none may use another's.
            self._device = PlannedCard(handle=self.library.created("cudnnCreate"))

    @contextmanager
    def planning(self) -> Iterator[PlannedCard]:
        """The device that plans are made for; this GPU is current meanwhile. One thread at a time may enter."""
        with self._planning, self.current():
            yield self._device

    def handle(self) -> c_void_p:
        """This thread's handle, set to torch's current stream.

        Raises:
            CudnnError: where cuDNN refuses.
            RuntimeError: while a CUDA graph is captured, if this thread has no handle yet and none is left over.
        """
        mine = self._mine
        try:
            handle: c_void_p = mine.handle
        except AttributeError:
            handle = mine.handle = self._take()
            mine.borrowed, mine.stream = _Borrowed(handle, self._free), None
        stream = self._current_stream(self.index)
        if stream != mine.stream:
            self.library.check(self.library.cudnnSetStream(handle, stream), "cudnnSetStream")
            mine.stream = stream
        return handle

    def scratch(self, size: int) -> torch.Tensor:
        """Memory of so many bytes from torch's allocator, for work on the current stream; this GPU must be current."""
        return empty_strided((size,), (1,), _BYTE)

    def is_current(self) -> bool:
        """Whether this is the current GPU."""
        return current_device() == self.index

    def current(self) -> AbstractContextManager[object]:
        """Makes this the current GPU, as cuDNN needs it."""
        return self._here if self.is_current() else torch.cuda.device(self.index)

    def _take(self) -> c_void_p:
        """A handle of a thread that has ended, else a new one and a spare: none can be made during a graph capture."""
        with self._lock:
            if torch.cuda.is_current_stream_capturing():
                if not self._free:
                    raise RuntimeError(
                        "this thread has no cuDNN handle, and none can be made in a CUDA graph's capture"
                    )
                return self._free.pop()
            with torch.cuda.device(self.index):
                handle = self._free.pop() if self._free else self.library.created("cudnnCreate")
                if not self._free:
                    self._free.append(self.library.created("cudnnCreate"))
            return handle


class _Borrowed:
    """A handle that goes back when its thread ends. It is never destroyed, as that would wait for the GPU."""

    def __init__(self, handle: c_void_p, free: list[c_void_p]) -> None:
        self.handle = handle
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.handle)
