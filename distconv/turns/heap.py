"""The heap of the C library: memory that parts have freed is returned to the system, where the heap would keep it; and
huge pages, as 2 MiB in one page are set up in less time than in pages of 4 KiB.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from distconv.tensors.gathering.memory import maps_are_limited
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


LARGEST = 1 << 22  # Larger huge pages, as some processors have, would make the process larger.

ROOM = 1 << 26  # The heap is made larger by at least so many bytes at once, which take no memory until they are used.

WHILE_PARTS_RUN = 1 << 30
"""While parts run, blocks of fewer bytes are in the heap, and so many freed bytes may stay at its end."""

OTHERWISE = 1 << 25
"""The limit for blocks at other times, glibc's own maximum; twice as many freed bytes may stay."""

RETURNED = 1 << 17  # After `return_freed`, blocks of so many bytes return to the system when they are freed.

_returns = False  # Whether `return_freed` was called.

_OF_A_USER = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"
"""Variables by which a user sets up the heap."""

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in malloc.h
_HUGE, _NOT_HUGE = 14, 15  # MADV_HUGEPAGE and MADV_NOHUGEPAGE in mman.h


class HugePages:
    """The huge pages of this process's heap, where `huge_pages` finds that it can have them.

    glibc takes each block of more than 32 MiB from the system, and returns it when it is freed. While parts run, such
    blocks are in the heap as well, for which huge pages are requested from the kernel. Memory that the heap gives back
    at its end needs a new request when it has grown; so it grows at once to where it ended before.

    ``start``: where the heap begins. ``always``: whether the kernel gives huge pages to those who do not ask, too.
    """

    def __init__(self, library: Any, start: int, always: bool) -> None:
        self._library, self._start, self._always, self._end = library, start, always, 0

    def begin(self) -> None:
        """Parts begin to run."""
        self._keep(WHILE_PARTS_RUN, WHILE_PARTS_RUN)
        self._advise(_HUGE)

    def end(self) -> None:
        """Parts have run: the kernel is not to make huge pages of the few pages that are left in use."""
        self._keep(OTHERWISE, 2 * OTHERWISE)
        if not self._always:
            self._advise(_NOT_HUGE)

    def trim(self) -> None:
        """Gives freed pages back to the system, and makes the heap as large as before: the room takes no memory yet."""
        self._end = max(self._end, self._library.sbrk(0))
        self._library.malloc_trim(0)
        block = self._library.malloc(min(max(self._end - self._library.sbrk(0), ROOM), WHILE_PARTS_RUN // 2))
        self._advise(_HUGE)
        self._library.free(block)

    def keep_small(self, start: int, size: int) -> None:
        """Asks for no huge pages for these bytes, to which nothing has been written yet."""
        page = mmap.PAGESIZE
        first, end = -(-start // page) * page, (start + size) // page * page
        self._library.madvise(first, max(end - first, 0), _NOT_HUGE)

    def _keep(self, block: int, freed: int) -> None:
        self._library.mallopt(_MMAP_THRESHOLD, block)
        self._library.mallopt(_TRIM_THRESHOLD, freed)

    def _advise(self, advice: int) -> None:
        """Advises the kernel about the whole heap. Contents do not change; where it refuses, pages stay as they are."""
        self._library.madvise(self._start, max(self._library.sbrk(0) - self._start, 0), advice)


def return_freed() -> None:
    """Lets blocks of 128 KiB and more return to the system when they are freed, from now on: the process is then hardly
    larger than its tensors, but pages are set up anew each time, which takes time. A user's own settings stay."""
    global _returns
    library = glibc()
    if library is not None and not any(name in os.environ for name in _OF_A_USER):
        library.mallopt(_MMAP_THRESHOLD, RETURNED)
        library.mallopt(_TRIM_THRESHOLD, RETURNED)
        _returns = True


def huge_pages() -> HugePages | None:
    """The heap's huge pages; None where the kernel or the C library has none, a user has set up the heap, freed blocks
    return to the system, or the memory that the process may map is limited: empty room of the heap would count."""
    return None if _returns or maps_are_limited() else _huge_pages()


@functools.cache
def _huge_pages() -> HugePages | None:
    library, enabled, size = glibc(), _SETTINGS / "enabled", _SETTINGS / "hpage_pmd_size"
    if library is None or not (enabled.exists() and size.exists()) or any(name in os.environ for name in _OF_A_USER):
        return None
    mode = enabled.read_text()
    if "[never]" in mode or int(size.read_text()) > LARGEST:
        return None
    heap = next((line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")), None)
    if heap is None:
        return None
    typed = ctypes.CDLL("libc.so.6")  # glibc's own functions, also beneath another allocator, with types
    typed.malloc.restype, typed.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    typed.free.argtypes, typed.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    typed.sbrk.restype, typed.sbrk.argtypes = ctypes.c_size_t, [ctypes.c_ssize_t]
    return HugePages(typed, int(heap.split("-")[0], 16), "[always]" in mode)


def keep_small(x: Tensor) -> None:
    """Lets a large tensor that is not written yet have small pages: the rows of each part are spread over it, so that
    with huge pages all of it would be in memory from the first part on."""
    if x.nbytes < LARGEST or x.device.type != "cpu" or isinstance(x, FakeTensor):
        return
    pages = huge_pages()
    if pages is not None:
        pages.keep_small(x.data_ptr(), x.nbytes)


def trim(library: Any) -> None:
    """Gives freed pages of the heap back to the system."""
    pages = huge_pages()
    if pages is not None:
        pages.trim()
    else:
        library.malloc_trim(0)
