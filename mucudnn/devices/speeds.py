"""The highest speeds that were measured of this process's processor, to rule out algorithms that cannot be fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch

SURE = 2.0  # Fresh pages may be given so many times as fast at another moment.

MOMENTS, ROUNDS = 5, 2
"""Moments at which a speed is measured, and calls at each. The fastest of all counts: beside other work a processor may
seem many times as slow as it is, and what such a speed rules out would never be tried."""

SIDE = 192  # Rows and columns of the matrices that are multiplied: 0.14 ms a product where a core does 100 GFLOP/s.

LARGE = (1 << 25) + 1
"""Bytes from which an allocation gets fresh pages of the system each time, which are slower to write many times: beyond
glibc's largest threshold."""

WRITTEN = 1 << 20  # Bytes that are written to measure the speed of writing.

_known: dict[Hashable, tuple[float, int]] = {}
"""The most in a second, and the number of moments at which it was measured, by what is done and the threads."""


def operations(dtype: torch.dtype, threads: int) -> float:
    """Floating-point operations in a second, of products of matrices, by so many threads."""
    return _most((dtype, threads))


def writing_speed(is_large: bool, threads: int) -> float:
    """Bytes in a second that are written to new tensors, large or small ones, by so many threads."""
    return (SURE if is_large else 1.0) * _most((is_large, threads))


def measure_type(dtype: torch.dtype, threads: int) -> None:
    """Measures the speeds of a type at one more moment, until they are known from `MOMENTS`."""
    for name in ((dtype, threads), (False, threads), (True, threads)):
        most, moments = _known.get(name, (0.0, 0))
        if moments < MOMENTS:
            _known[name] = max(most, _now(name[0])), moments + 1


def raise_by(factor: float, dtype: torch.dtype, threads: int) -> None:
    """Notes that something was done in less time than the speeds allow, by a factor."""
    for name in ((dtype, threads), (False, threads), (True, threads)):
        if name in _known:
            most, moments = _known[name]
            _known[name] = factor * most, moments


def _most(name: tuple[torch.dtype | bool, int]) -> float:
    if name not in _known:
        _known[name] = _now(name[0]), 1
    return _known[name][0]


def _now(kind: torch.dtype | bool) -> float:
    """The speed at this moment: operations of a dtype in a second, or bytes that are written in a second."""
    if isinstance(kind, torch.dtype):
        a, b = torch.ones(2, SIDE, SIDE, dtype=kind)
        return 2 * SIDE**3 / _least(lambda: torch.mm(a, b))
    size = LARGE if kind else WRITTEN
    return WRITTEN / _least(lambda: torch.empty(size, dtype=torch.uint8)[:WRITTEN].fill_(0))


def _least(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return max(min(seconds), 1e-9)
