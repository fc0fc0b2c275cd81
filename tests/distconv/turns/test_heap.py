"""The heap gives back what was freed between blocks that are still used."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from distconv.turns import heap
from mucudnn.devices.process_memory import glibc, heap_bytes, resident_bytes

BLOCK, COUNT, BETWEEN = 100_000, 5000, 4000
"""Bytes of the blocks that are freed, how many there are, and bytes of those that stay, between them."""


@pytest.mark.skipif(glibc() is None, reason="the C library is not glibc 2.33 or later")
def test_freed_blocks_go_back_where_the_process_would_become_larger() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    watch = heap.Heap()
    watch.tidy()

    def made(size: int, count: int) -> list[int]:
        """Blocks, which are all resident."""
        blocks = [library.malloc(size) for _ in range(count)]
        for block in blocks:
            ctypes.memset(block, 1, size)
        return blocks

    pairs = [made(BLOCK, 1) + made(BETWEEN, 1) for _ in range(COUNT)]
    watch.tidy()
    before = resident_bytes()
    for block, _ in pairs[: COUNT // 100]:
        library.free(block)
    watch.settle()
    assert before - resident_bytes() < BLOCK  # they are few
    for block, _ in pairs[COUNT // 100 :]:
        library.free(block)
    watch.tidy()
    assert before - resident_bytes() < BLOCK  # others may fit there
    larger = made(2 * BLOCK, COUNT // 2)
    watch.tidy()
    assert resident_bytes() < before + BLOCK * COUNT // 4
    for block in larger:
        library.free(block)
    watch.settle()
    assert before - resident_bytes() > BLOCK * COUNT // 2
    for _, between in pairs:
        library.free(between)


@pytest.mark.skipif(glibc() is None or heap._mkl() is None, reason="no glibc 2.33 or later, or no MKL to ask")
def test_what_mkl_keeps_for_a_thread_goes_when_its_turn_ends() -> None:
    found, threads = [], torch.get_num_threads()

    def turn() -> None:
        torch.set_num_threads(1)  # others keep as much, which is not this thread's to free
        x = torch.ones(512, 512)
        before = heap_bytes()
        x @ x
        kept = heap_bytes()
        heap.Heap().tidy()
        found.extend([kept - before, heap_bytes() - before])

    thread = threading.Thread(target=turn)
    thread.start()
    thread.join()
    torch.set_num_threads(threads)
    kept, left = found
    assert kept > 1 << 18
    assert left < kept // 4


@pytest.mark.skipif(glibc() is None, reason="the C library is not glibc 2.33 or later")
def test_freed_pages_go_back_while_a_limit_holds() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    limit = BLOCK * COUNT // 4
    watch = heap.Excess()
    watch.begin()
    watch.check(BLOCK, 0, limit)  # from here on the process is compared with what it was
    blocks = [library.malloc(size) for _ in range(COUNT) for size in (BLOCK, BETWEEN)]
    for block in blocks[::2]:
        ctypes.memset(block, 1, BLOCK)
    before = resident_bytes()
    for block in blocks[::2]:
        library.free(block)
    watch.check(limit // heap.LOOKS - BLOCK, 0, limit)
    assert before - resident_bytes() < BLOCK  # little was made since
    watch.check(BLOCK, 0, limit)
    assert before - resident_bytes() > BLOCK * COUNT // 2
    for block in blocks[1::2]:
        library.free(block)
