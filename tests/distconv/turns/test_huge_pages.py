"""The heap of parts in turn lies in huge pages, where the kernel has them, also after it was given back."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from distconv.turns.heap import HugePages, _huge_pages, huge_pages, trim
from mucudnn.devices.process_memory import glibc

BLOCK = 1 << 28
"""Larger than the blocks that glibc by itself has in the heap."""

needs_huge_pages = pytest.mark.skipif(huge_pages() is None, reason="no huge pages, or a user's own heap")


def is_in_huge_pages(address: int) -> bool:
    """Whether the kernel was told so of the memory at an address; False outside of the heap."""
    at_heap = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            first, last = (int(end, 16) for end in words[0].split("-"))
            at_heap = first <= address < last and words[-1] == "[heap]"
        elif at_heap and words[0] == "VmFlags:":
            return "hg" in words
    return False


@needs_huge_pages
def test_large_blocks_lie_in_huge_pages_while_parts_run_and_after_the_heap_was_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distconv.turns.heap._returns", False)  # as other tests of this process may have set it
    pages = huge_pages()
    assert isinstance(pages, HugePages)
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pages.begin()
    try:
        library.free(library.malloc(BLOCK))  # the heap was as large once
        for _ in range(2):
            trim(glibc())
            block = library.malloc(BLOCK // 2)
            assert is_in_huge_pages(block + BLOCK // 4)
            ctypes.memset(block, 1, BLOCK // 2)
            library.free(block)
    finally:
        pages.end()
    block = library.malloc(2 * BLOCK)  # more than is free at the end of the heap
    assert not is_in_huge_pages(block + BLOCK)
    library.free(block)


@needs_huge_pages
@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_heap_that_a_user_has_set_up_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distconv.turns.heap._returns", False)
    monkeypatch.setenv(name, "")
    _huge_pages.cache_clear()
    try:
        assert huge_pages() is None
    finally:
        _huge_pages.cache_clear()
    monkeypatch.delenv(name)
    assert huge_pages() is not None
