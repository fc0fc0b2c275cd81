"""Speeds: the most that this process's processor does in a second, measured once, to tell what cannot be fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

SURE = 2.0
"""Fresh pages may come so many times as fast at another moment: the system gives them."""

ROUNDS = 5
"""Calls of which the fastest counts. On a machine that is busy all the while the speed is too low, and so rules out too
much."""

SIDE = 256
"""Rows and columns of the matrices that are multiplied: 0.3 ms a product where a core does 100 GFLOP/s."""

LARGE = (1 << 25) + 1
"""Bytes from which an allocation gets fresh pages of the system each time, which are slower to write many times: beyond
glibc's largest threshold."""

WRITTEN = 1 << 21
"""Bytes that are written to tell the speed of writing."""


@cache
def operations(dtype: torch.dtype, threads: int) -> float:
    """Floating-point operations in a second, of products of matrices, by so many threads."""
    a, b = torch.ones(2, SIDE, SIDE, dtype=dtype)
    return 2 * SIDE**3 / _least(lambda: torch.mm(a, b))


@cache
def written(is_large: bool, threads: int) -> float:
    """Bytes in a second that are written to new tensors, large or small ones, by so many threads."""
    size = LARGE if is_large else WRITTEN
    seconds = _least(lambda: torch.empty(size, dtype=torch.uint8)[:WRITTEN].fill_(0))
    return (SURE if is_large else 1.0) * WRITTEN / seconds


def _least(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return max(min(seconds), 1e-9)
