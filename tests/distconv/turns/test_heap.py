"""The heap gives back what was freed between blocks that are still used."""

from __future__ import annotations

import ctypes

import pytest

from distconv.turns import heap

BLOCK, COUNT, BETWEEN = 100_000, 5000, 4000
"""Bytes of the blocks that are freed, how many there are, and bytes of those that stay, between them."""


@pytest.mark.skipif(heap._glibc() is None, reason="the C library is not glibc 2.33 or later")
def test_freed_blocks_go_back_where_they_are_much_of_what_was_used() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    watch = heap.Heap()
    watch.tidy()
    blocks = [(library.malloc(BLOCK), library.malloc(BETWEEN)) for _ in range(COUNT)]
    for block, _ in blocks:
        ctypes.memset(block, 1, BLOCK)
    watch.tidy()
    for block, _ in blocks[: COUNT // 100]:
        library.free(block)
    before = heap._resident()
    watch.tidy()
    assert before - heap._resident() < BLOCK
    for block, _ in blocks[COUNT // 100 :]:
        library.free(block)
    watch.tidy()
    assert before - heap._resident() > BLOCK * COUNT // 2
    for _, between in blocks:
        library.free(between)
