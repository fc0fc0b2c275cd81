"""Workspace reuse (WR): finds the fastest division of one convolution in which every call fits a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mucudnn.optimizer.cover import Cover
from mucudnn.optimizer.option import Division, Option

POLICIES = ("undivided", "powerOfTwo", "all")
"""The names of the policies for micro-batch sizes (mu-cuDNN, Oyama et al. 2018, section III-D)."""


def micro_batch_sizes(policy: str, extent: int) -> list[int]:
    """The micro-batch sizes that a policy tries for a mini-batch, ascending.

    Args:
        policy: `undivided` {B}; `powerOfTwo` {1, 2, 4, ... <= B} and B; `all` {1 .. B}.
        extent: the mini-batch size B in samples.

    Raises:
        ValueError: for a policy of another name.
    """
    if policy == "undivided":
        return [extent]
    if policy == "powerOfTwo":
        powers = [1 << exponent for exponent in range(extent.bit_length())]
        return sorted({*powers, extent})
    if policy == "all":
        return list(range(1, extent + 1))
    raise ValueError(f"policy={policy!r}: accepted are {', '.join(POLICIES)}")


def best_division(options: Iterable[Option], extent: int, limit: float, dim: str = "batch") -> Division | None:
    """The fastest division of a mini-batch into the given options, each within the workspace limit.

    With T1(b) the least time among the options of extent b that fit, the programme is
    T(b) = min over b1 of T1(b1) + T(b - b1), T(0) = 0 (mu-cuDNN, Oyama et al. 2018, equation 1). An option may be
    used any number of times.

    Args:
        options: calls to choose from, of any extents.
        extent: the mini-batch size in samples, at least 0.
        limit: bytes that one call may use; `math.inf` for no limit.
        dim: what is divided, if not the mini-batch.

    Returns:
        The division, its options sorted by algorithm and descending extent so that calls of one algorithm are
        neighbours; of divisions equally fast, one with the fewest parts. `None` where nothing fits.
    """
    cover = Cover(extent, dim)
    # The fastest per sample first: most of the other options then improve nothing and are skipped at once.
    for option in sorted(options, key=lambda option: (option.seconds / option.extent, option.workspace)):
        if option.workspace <= limit:
            cover.add(option)
    return None if cover.seconds == math.inf else cover.division()
