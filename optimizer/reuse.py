"""Workspace reuse (WR): finds the fastest division of one convolution in which every call fits a limit.

The desirable set has the choices that no other choice dominates in time and workspace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from typing import TypeVar

import numpy as np

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


class Cover:
    """T(n), the least seconds of calls whose extents add up to n, for every n up to `extent`.

    The programme T(b) = min over b1 of T1(b1) + T(b - b1), T(0) = 0 (mu-cuDNN, Oyama et al. 2018, equation 1), is an
    unbounded knapsack, so it can be solved call by call: with one more call of extent b and seconds t,
    T'(n) = min over k of k t + T(n - k b). Any k is a sum of different powers of two, so adding 1, 2, 4, ...
    calls in turn, each where it helps, reaches it.

    Of divisions that are equally fast the one with the fewest parts counts.
    """

    def __init__(self, extent: int, dim: str = "batch") -> None:
        self.extent = extent
        self._dim = dim
        self._seconds = np.full(extent + 1, np.inf)
        self._seconds[0] = 0.0
        self._parts = np.zeros(extent + 1, dtype=np.int64)
        # The call that was taken last in the best division of n, and how many times in a row.
        self._last = np.zeros(extent + 1, dtype=np.int64)
        self._times = np.zeros(extent + 1, dtype=np.int64)
        self._options: list[Option] = []

    @property
    def seconds(self) -> float:
        """T(extent); `math.inf` while no calls add up to it."""
        return float(self._seconds[self.extent])

    def add(self, option: Option) -> None:
        """Makes a call available, any number of times."""
        step, times = option.extent, 1
        if step > self.extent or (option.seconds, 1) >= (self._seconds[step], self._parts[step]):
            return  # calls that add up to this extent are known and as fast
        self._options.append(option)
        while step <= self.extent:
            seconds = times * option.seconds + self._seconds[:-step]
            parts = times + self._parts[:-step]
            now, before = self._seconds[step:], self._parts[step:]
            better = (seconds < now) | ((seconds == now) & (parts < before) & (seconds < np.inf))
            now[better] = seconds[better]
            before[better] = parts[better]
            self._last[step:][better] = len(self._options) - 1
            self._times[step:][better] = times
            step, times = 2 * step, 2 * times

    def division(self) -> Division:
        """The best division of the whole extent, its calls sorted by algorithm and descending extent.

        Raises:
            ValueError: while no calls add up to the extent.
        """
        if self.seconds == np.inf:
            raise ValueError(f"extent={self.extent}: the calls do not add up to it")
        chosen: list[Option] = []
        left = self.extent
        while left:
            option, times = self._options[self._last[left]], int(self._times[left])
            chosen += [option] * times
            left -= times * option.extent
        return Division(tuple(sorted(chosen, key=lambda option: (option.algorithm, -option.extent))), self._dim)


Item = TypeVar("Item", bound=Option | Division)


def desirable_set(items: Iterable[Item]) -> list[Item]:
    """The items that no other item dominates (mu-cuDNN, Oyama et al. 2018, section III-B).

    One item dominates another if it is at least as good in `seconds` and in `workspace` and better in one of them.
    Of items that are equal in both, the first is kept.

    Returns:
        The set in ascending workspace, therefore in strictly descending time.
    """
    kept: list[Item] = []
    for item in sorted(items, key=lambda item: (item.workspace, item.seconds)):
        if not kept or item.seconds < kept[-1].seconds:
            kept.append(item)
    return kept


def desirable_divisions(options: Iterable[Option], extent: int, dim: str = "batch") -> list[Division]:
    """The divisions of a mini-batch that no other division dominates.

    Sweeps the limit over the distinct workspaces, ascending: the fastest division within a limit belongs to the set if
    it is faster than that of the limit before. The calls that a limit adds are added to what is known, so that the
    whole sweep costs as much as one limit.

    Args:
        options: calls to choose from, of any extents, each any number of times.
        extent: the mini-batch size in samples, at least 0.
        dim: what is divided, if not the mini-batch.

    Returns:
        The set in ascending workspace, therefore in strictly descending time; of divisions equally good, one with the
        fewest parts. Empty where the options do not add up to the extent.
    """
    cover = Cover(extent, dim)
    found: list[Division] = []
    ascending = sorted(options, key=lambda option: (option.workspace, option.seconds / option.extent))
    for _, calls in groupby(ascending, key=lambda option: option.workspace):
        before = cover.seconds
        for option in calls:
            cover.add(option)
        if cover.seconds < before:
            found.append(cover.division())
    if not found and cover.seconds < math.inf:
        found.append(cover.division())  # the extent is 0: a division without calls
    return desirable_set(found)
