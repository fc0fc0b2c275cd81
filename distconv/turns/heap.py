"""The heap of the C library: what parts have freed goes back to the system, or the process would not become smaller."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

KEPT = 8
"""Of the most that was used, the heap may keep one part in so many of pages that were freed."""

_ARENA_MAX = -8  # as in malloc.h


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


class Heap:
    """Watches the heap of this process."""

    def __init__(self) -> None:
        self._used = 0
        """The most bytes that were used at once."""
        self._other: int | None = None
        """The least bytes that were resident and not used: code, what Python holds, and freed pages."""

    def tidy(self) -> None:
        """Gives freed memory back to the system where pages of it take more than an eighth of what was used at most.

        glibc keeps freed blocks of up to 32 MiB for blocks that will fit there, which those of another part or layer
        often do not. To give all back at once, as MALLOC_MMAP_THRESHOLD_ makes it do, costs more time, for pages that
        come again are set up anew.
        """
        library = _glibc()
        if library is None:
            return
        figures = library.mallinfo2()
        used = figures.uordblks + figures.hblkhd
        self._used = max(self._used, used)
        other = _resident() - used
        if self._other is not None and other - self._other > self._used // KEPT:
            library.malloc_trim(0)
            other = _resident() - used
        self._other = other if self._other is None else min(self._other, other)


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
