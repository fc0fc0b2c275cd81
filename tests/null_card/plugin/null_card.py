"""What tests ask of the null card, where it is there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

IS_HERE = "NULL_CARD_CUDNN" in os.environ


@cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL("libcuda.so.1")
    found.null_card_counted.argtypes, found.null_card_counted.restype = (ctypes.c_char_p,), ctypes.c_uint64
    return found


def counted(name: str) -> int:
    """What the card has counted since the process began, by a name of `struct counts` in null.h."""
    found: int = library().null_card_counted(name.encode())
    assert found != 2**64 - 1, f"{name} is not counted"
    return found


@contextmanager
def only_timed() -> Iterator[None]:
    """Convolutions of this thread are launched, but not computed."""
    library().null_card_only_time(1)
    try:
        yield
    finally:
        library().null_card_only_time(0)
