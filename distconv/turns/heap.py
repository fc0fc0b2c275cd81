"""Gives memory that parts have freed back to the system: the C library's heap would keep it."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from distconv.turns.huge_pages import huge_pages, trim
from mucudnn.devices.process_memory import glibc, heap_bytes, resident_bytes

KEPT = 8  # Beside what is used, the heap may keep freed pages of one part in so many of that.

EXCESS, LEAST = 3, 1 << 24
"""Within a limit, freed pages of one part in so many of it may stay, or of so many bytes where that is more."""

HUGE = 2  # Huge pages cost less to set up again, so that many times less may stay.

LOOKS = 16  # The process is looked at when one part in so many of the limit has been made anew.

_ARENA_MAX = -8  # as in malloc.h

_FREE = "mkl_serv_thread_free_buffers"  # The name by which torch's library has mkl_thread_free_buffers.


def share_one_arena() -> None:
    """Threads that start from now on take their memory from one place, so that one reuses what another has freed."""
    library = glibc()
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
        self._used = 0  # The most bytes that were found used at once.
        self._other = 0
        """Bytes that were resident and not used when freed pages were last given back: code, and Python's objects."""

    def begin(self) -> None:
        """Parts are to run."""
        pages = huge_pages()
        if pages is not None:
            pages.begin()

    def tidy(self) -> None:
        """Between turns, in the thread that has had its: gives freed pages back where more is resident than was used at
        most, and an eighth of that.

        What MKL keeps for a thread's next product of matrices, some 12 MiB whatever their sizes, it frees.
        """
        products = _mkl()
        if products is not None:
            getattr(products, _FREE)()
        library = glibc()
        if library is not None and resident_bytes() > self._other + self._used + self._used // KEPT:
            self._give_back(library)

    def settle(self) -> None:
        """After all turns: gives freed pages back where they are more than an eighth of what is used."""
        library = glibc()
        if library is None:
            return
        used = heap_bytes()
        if resident_bytes() - self._other > used + used // KEPT:
            self._give_back(library)
        pages = huge_pages()
        if pages is not None:
            pages.end()

    def _give_back(self, library: Any) -> None:
        used = heap_bytes()
        trim(library)
        self._used, self._other = max(self._used, used), resident_bytes() - used


class Excess:
    """Watches, while operators of parts run within a limit, how much larger the process is than the parts' tensors.

    An operator's scratch, and a tensor that was freed for a limit's sake, leave free pages behind in the heap. They are
    given back where the process would otherwise be larger than by the limit and a third of it, in huge pages a sixth.
    """

    def __init__(self) -> None:
        self._other: int | None = None
        """Bytes that were resident and no tensors of parts when freed pages were last given back."""
        self._made = 0  # Bytes of tensors that were made since the process was last looked at.

    def begin(self) -> None:
        """A call begins: the other memory of the process may have become more, or less."""
        self._other = None

    def check(self, made: int, resident: int, limit: int) -> None:
        """Called after an operator that has made ``made`` bytes. ``resident``: bytes of all parts on the device."""
        self._made += made
        if self._other is not None and self._made < limit // LOOKS:
            return
        library = glibc()
        if library is None:
            return
        self._made = 0
        excess = EXCESS if huge_pages() is None else HUGE * EXCESS
        if self._other is None or resident_bytes() > self._other + limit + max(limit // excess, LEAST):
            trim(library)
            self._other = resident_bytes() - resident
