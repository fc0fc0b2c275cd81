"""Returns memory that parts have freed to the system, where the heap of the C library would keep it."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from distconv.turns.huge_pages import huge_pages, trim
from mucudnn.devices.process_memory import glibc, heap_bytes, resident_bytes

KEPT = 8  # The heap may keep freed pages of 1/KEPT of the bytes that are used.

EXCESS, LEAST = 3, 1 << 24
"""Within a limit, the heap may keep freed pages of 1/EXCESS of it, or of LEAST bytes where that is more."""

HUGE = 2  # The heap may keep 1/HUGE of that in huge pages, which cost less to set up again.

LOOKS = 16  # The size of the process is checked when tensors of 1/LOOKS of the limit have been made.

_ARENA_MAX = -8  # as in malloc.h

_FREE = "mkl_serv_thread_free_buffers"  # The name of mkl_thread_free_buffers in torch's library.


def share_one_arena() -> None:
    """Lets threads that start from now on share one arena of the heap, so that one reuses memory that another freed."""
    library = glibc()
    if library is not None:
        library.mallopt(_ARENA_MAX, 1)


@functools.cache
def _mkl() -> Any:
    """Torch's library for processors, if it contains MKL's function to free buffers; else None."""
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
        """Called before parts run."""
        pages = huge_pages()
        if pages is not None:
            pages.begin()

    def tidy(self) -> None:
        """Called at the end of each turn, in the part's thread: returns freed pages where more is resident than the
        most bytes used so far and an eighth of that.

        It also frees the buffer that MKL keeps for a thread's next product of matrices: 12 MiB, whatever their sizes.
        """
        products = _mkl()
        if products is not None:
            getattr(products, _FREE)()
        library = glibc()
        if library is not None and resident_bytes() > self._other + self._used + self._used // KEPT:
            self._give_back(library)

    def settle(self) -> None:
        """Called when all parts have run: returns freed pages where they are more than an eighth of the used bytes."""
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

    An operator's scratch, and a tensor that has left the device, leave free pages behind in the heap. They are returned
    where the process would otherwise take more than the limit and a third of it, in huge pages a sixth, beside the
    memory that is not of parts.
    """

    def __init__(self) -> None:
        self._other: int | None = None
        """Resident bytes, less tensors of parts, when freed pages were last returned."""
        self._made = 0  # Bytes of tensors that were made since the process was last looked at.

    def begin(self) -> None:
        """Called when a call begins: the other memory of the process may have become more, or less."""
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
