"""The heap gives back what was freed between blocks that are still used."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from distconv.turns import heap

BLOCK, COUNT, BETWEEN = 100_000, 1000, 4000
"""Bytes of the blocks that are freed, how many there are, and bytes of those that stay, between them."""


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(heap._glibc() is None, reason="the C library is not glibc 2.33 or later")
def test_freed_blocks_go_back_where_there_are_more_than_asked_for() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [(library.malloc(BLOCK), library.malloc(BETWEEN)) for _ in range(COUNT)]
    for block, _ in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block, _ in blocks:
        library.free(block)
    before = resident()
    heap.trim(1 << 40)
    assert before - resident() < BLOCK * COUNT // 10
    heap.trim(BLOCK)
    assert before - resident() > BLOCK * COUNT // 2
    for _, between in blocks:
        library.free(between)
