"""The C library's allocator, told not to make one arm of a comparison pay for page faults."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> None:
    """Tells glibc, where it is the allocator, to keep all freed memory and to reuse it.

    Left to itself it gives large blocks back now and then: a call that gets new ones takes two or three times as long,
    whichever arm it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # as in malloc.h
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)
