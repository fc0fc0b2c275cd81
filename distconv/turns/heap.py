"""The heap of the C library: memory that was freed goes back to the system, or what leaves it would free nothing."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

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


def trim(most: int) -> None:
    """Gives freed memory back to the system where the heap keeps more of it than ``most`` bytes.

    glibc keeps blocks of up to 32 MiB that were freed, for blocks that will fit there. To give them back at once, as
    MALLOC_MMAP_THRESHOLD_ makes it do, costs more time, for all their pages are then set up again at the next use.
    """
    library = _glibc()
    if library is not None and library.mallinfo2().fordblks > most:
        library.malloc_trim(0)
