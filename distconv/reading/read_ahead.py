"""Controls how much of a file the operating system reads ahead of what it is asked for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def no_read_ahead(descriptor: int) -> Iterator[None]:
    """A context in which the disk delivers only the requested parts of a file.

    Ranks that read a slab of every sample would otherwise bring their neighbours' slabs as well.
    """
    if not hasattr(os, "posix_fadvise"):
        yield
        return
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        yield
    finally:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_NORMAL)
