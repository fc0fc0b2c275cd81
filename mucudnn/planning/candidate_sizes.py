"""Candidate sizes: which sizes of parts of a candidate are tried, and what they need."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from mucudnn.convolution.problem import ConvProblem, Dim
from mucudnn.convolution.tile import extent
from mucudnn.optimizer import micro_batch_sizes
from mucudnn.providers import STOCK
from mucudnn.timing.measurement import Candidate, Measurement


def sizes_of(problem: ConvProblem, candidate: Candidate, dim: Dim, policy: str) -> set[int]:
    """The sizes that a policy tries; the whole is left out where another trial computes it in the same way."""
    whole = extent(problem, dim)
    sizes = set(micro_batch_sizes(policy, whole))
    return sizes - {whole} if candidate[1] == STOCK or dim is not Dim.BATCH else sizes


def fitting(
    measurement: Measurement, candidate: Candidate, dim: Dim, allowed: float, sizes: Iterable[int]
) -> dict[int, int]:
    """{size: bytes of workspace}, for those of the sizes whose parts the candidate serves within a limit."""
    needs = {size: measurement.workspace(candidate, dim, size) for size in sizes}
    return {size: need for size, need in needs.items() if need is not None and need <= allowed}


def fitting_sizes(
    measurement: Measurement, candidate: Candidate, dim: Dim, allowed: float, policy: str
) -> dict[int, int]:
    """The sizes that a policy tries, as `fitting`.

    Tiles overlap, so the best use of a limit is as few tiles as possible, of equal size: this size is tried, too.
    """
    problem = measurement.problem
    found = fitting(measurement, candidate, dim, allowed, sizes_of(problem, candidate, dim, policy))
    if dim is not Dim.BATCH and found:
        whole = extent(problem, dim)

        def is_too_large(size: int) -> bool:
            return not fitting(measurement, candidate, dim, allowed, [size])

        largest = bisect_left(range(whole), True, lo=max(found) + 1, key=is_too_large) - 1
        even = -(-whole // -(-whole // largest))
        found |= fitting(measurement, candidate, dim, allowed, [even])
    return found
