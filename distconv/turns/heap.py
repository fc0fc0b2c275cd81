"""The heap of the C library: what parts have freed goes back to the system, or the process would not become smaller."""

from __future__ import annotations

import ctypes
import functools
import mmap
from pathlib import Path
from typing import Any

import torch

KEPT = 8
"""Beside what is used, the heap may keep freed pages of one part in so many of that."""

_ARENA_MAX = -8  # as in malloc.h

_FREE = "mkl_serv_thread_free_buffers"
"""The name by which torch's library has mkl_thread_free_buffers."""


class _Figures(ctypes.Structure):
    """What glibc's mallinfo2 tells, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@functools.cache
def _glibc() -> Any:
    """The C library, where it is glibc 2.33 or later; else None, and its heap is left as it is."""
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in ("mallinfo2", "malloc_trim", "mallopt")):
        return None
    library.mallinfo2.restype = _Figures
    return library


def share_one_arena() -> None:
    """Threads that start from now on take their memory from one place, so that one reuses what another has freed."""
    library = _glibc()
    if library is not None:
        library.mallopt(_ARENA_MAX, 1)


@functools.cache
def _mkl() -> Any:
    """Torch's library of a processor, where MKL in it can be asked; else None."""
    file = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ctypes.CDLL(str(file)) if file.exists() else None
    return library if hasattr(library, _FREE) else None


class Heap:
    """Watches the heap of this process while parts run.

    glibc keeps freed blocks of up to 32 MiB for blocks that will fit there, which those of another part or layer often
    do not. To give all back at once, as MALLOC_MMAP_THRESHOLD_ makes it do, costs more time, for pages that come again
    are set up anew. So freed pages are kept while they do not make the process larger than it has to be anyway.
    """

    def __init__(self) -> None:
        self._used = 0
        """The most bytes that were found used at once."""
        self._other = 0
        """Bytes that were resident and not used when freed pages were last given back: code, and what Python holds."""

    def tidy(self) -> None:
        """Between turns, in the thread that has had its: gives freed pages back where more is resident than was used at
        most, and an eighth of that.

        What MKL keeps for a thread's next product of matrices, some 12 MiB whatever their sizes, it frees.
        """
        products = _mkl()
        if products is not None:
            getattr(products, _FREE)()
        library = _glibc()
        if library is not None and _resident() > self._other + self._used + self._used // KEPT:
            self._give_back(library)

    def settle(self) -> None:
        """After all turns: gives freed pages back where they are more than an eighth of what is used."""
        library = _glibc()
        if library is None:
            return
        used = _used(library)
        if _resident() - self._other > used + used // KEPT:
            self._give_back(library)

    def _give_back(self, library: Any) -> None:
        used = _used(library)
        library.malloc_trim(0)
        self._used, self._other = max(self._used, used), _resident() - used


def _used(library: Any) -> int:
    """Bytes that are not freed."""
    figures = library.mallinfo2()
    return int(figures.uordblks + figures.hblkhd)


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
