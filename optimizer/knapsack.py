"""The multiple-choice knapsack: takes one item of every group within a total of bytes, in provably the least time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_ROUNDING = 1e-12
"""A choice better by a smaller fraction is not searched for: sums of floating-point seconds are no more exact."""


class Group(NamedTuple):
    """The choices of one kernel: items in strictly ascending bytes and strictly descending seconds."""

    bytes: Integers
    seconds: Numbers


@dataclass(frozen=True)
class Solution:
    """One item of every group.

    Attributes:
        items: their indices, by group.
        seconds: their sum.
        bound: no choice takes less; equal to `seconds` where this one is proven to be an optimum.
    """

    items: list[int]
    seconds: float
    bound: float

    @property
    def proven(self) -> bool:
        """Whether this is an optimum."""
        return self.seconds <= self.bound


def solve(groups: Sequence[Group], total: int, patience: float = math.inf) -> Solution:
    """The choice with the least sum of seconds whose bytes add up to `total` at most.

    A sweep over the groups keeps every partial choice that no other dominates in bytes and seconds and that may still
    lead to something better than the best complete choice known, by the bound of its linear relaxation. The relaxation
    of any partial choice, rounded down, is a complete choice too, so that bound and best choice soon agree. (Dynamic
    programming with bounds, as in Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", 1995.)

    Args:
        groups: their lightest items together fit the total.
        total: bytes.
        patience: gives up after so many seconds.
    """
    deadline = time.monotonic() + patience
    whole = _Increments(groups).relaxation(0)
    start = _rounded(whole, len(groups), total)
    if start.proven:
        return start
    kept = [_worthwhile(group, whole.price(total), start.seconds - start.bound) for group in groups]
    # The groups whose items differ most in bytes come first. Rounding down the relaxation of the groups that are left,
    # whose items differ little, then loses little.
    order = sorted(range(len(groups)), key=lambda index: -int(np.ptp(groups[index].bytes[kept[index]])))
    worthwhile = [Group(groups[index].bytes[kept[index]], groups[index].seconds[kept[index]]) for index in order]
    sweep = _Sweep(worthwhile, total, start.seconds)
    while not sweep.finished and time.monotonic() <= deadline:
        sweep.advance()
    items = list(start.items)
    if sweep.choice is not None:
        for index, item in zip(order, sweep.choice, strict=True):
            items[index] = int(kept[index][item])
    return Solution(items, sweep.best, sweep.best if sweep.finished else max(start.bound, min(sweep.bound, sweep.best)))


def _rounded(whole: _Relaxation, groups: int, total: int) -> Solution:
    room = np.array([total])
    seconds, corner = whole.rounded(room)
    best, bound = float(seconds[0]), float(whole.least(room)[0])
    return Solution(whole.items(groups, int(corner[0])), best, best if bound >= best * (1 - _ROUNDING) else bound)


def _worthwhile(group: Group, price: float, gap: float) -> Integers:
    """The items that can be part of a better choice: those whose cost at the price of bytes is not above the gap."""
    cost = group.seconds + price * group.bytes
    return np.flatnonzero(cost - cost.min() <= gap * (1 + 1e-6))


class _Increments:
    """The steps along the lower convex hulls of all groups, the most seconds saved per byte first."""

    def __init__(self, groups: Sequence[Group]) -> None:
        hulls = [_hull(group) for group in groups]
        owners = np.repeat(np.arange(len(groups)), [len(hull) - 1 for hull in hulls])
        bytes_ = np.concatenate([np.diff(group.bytes[hull]) for group, hull in zip(groups, hulls, strict=True)])
        seconds = np.concatenate([np.diff(group.seconds[hull]) for group, hull in zip(groups, hulls, strict=True)])
        targets = np.concatenate([hull[1:] for hull in hulls])
        order = np.argsort(seconds / bytes_, kind="stable")
        self._owners, self._bytes, self._seconds, self._targets = (
            column[order] for column in (owners, bytes_, seconds, targets)
        )
        self._least_bytes = np.array([group.bytes[0] for group in groups], dtype=np.int64)
        self._most_seconds = np.array([group.seconds[0] for group in groups])

    def relaxation(self, first: int) -> _Relaxation:
        """The relaxation of the groups from number `first` on."""
        mine = self._owners >= first
        return _Relaxation(
            np.cumsum(np.append(self._least_bytes[first:].sum(), self._bytes[mine])),
            np.cumsum(np.append(self._most_seconds[first:].sum(), self._seconds[mine])),
            self._owners[mine],
            self._targets[mine],
        )


class _Relaxation(NamedTuple):
    """The least seconds of some groups as a function of the bytes they may have, items being divisible.

    Attributes:
        bytes, seconds: the corners of this convex function, the first being the lightest choice.
        owners, targets: the group and the item that each corner but the first changes to.
    """

    bytes: Integers
    seconds: Numbers
    owners: Integers
    targets: Integers

    def least(self, room: Integers) -> Numbers:
        """Seconds within `room`, which is not below the lightest choice."""
        return np.interp(room, self.bytes, self.seconds)

    def rounded(self, room: Integers) -> tuple[Numbers, Integers]:
        """Seconds of the last corner within `room`, which is a choice of whole items, and the corner's index."""
        corner = np.searchsorted(self.bytes, room, side="right") - 1
        return self.seconds[corner], corner

    def items(self, groups: int, corner: int) -> list[int]:
        """The choice at a corner, for the last `groups` of the groups by their numbers."""
        chosen = {
            int(owner): int(item) for owner, item in zip(self.owners[:corner], self.targets[:corner], strict=True)
        }
        return [chosen.get(number, 0) for number in range(groups)]

    def price(self, room: int) -> float:
        """Seconds that one more byte saves at `room`, inside the function's range."""
        corner = int(self.rounded(np.array([room]))[1][0])
        return -float((self.seconds[corner + 1] - self.seconds[corner]) / (self.bytes[corner + 1] - self.bytes[corner]))


def _hull(group: Group) -> Integers:
    """The items on the lower convex hull."""
    x, y = group.bytes.tolist(), group.seconds.tolist()
    corners: list[int] = []
    for item in range(len(x)):
        while len(corners) > 1:
            one, two = corners[-2:]
            if (y[two] - y[one]) * (x[item] - x[two]) < (y[item] - y[two]) * (x[two] - x[one]):
                break
            corners.pop()
        corners.append(item)
    return np.array(corners)


class _Sweep:
    """The partial choices over the first groups, and the best complete choice.

    Attributes:
        best: seconds of the best choice known.
        choice: its items; `None` while it is the one that was known at the start.
        bound: no choice takes less than this or `best`.
    """

    def __init__(self, groups: Sequence[Group], total: int, best: float) -> None:
        self.best, self.choice = best, None  # type: float, list[int] | None
        self.bound = -math.inf
        self._groups, self._total = groups, total
        self._increments = _Increments(groups)
        self._bytes, self._seconds = np.zeros(1, dtype=np.int64), np.zeros(1)
        self._trail: list[tuple[Integers, Integers]] = []

    @property
    def finished(self) -> bool:
        """Whether nothing is better than `best`."""
        return not len(self._bytes) or len(self._trail) == len(self._groups)

    def advance(self) -> None:
        """Adds every item of the next group to every partial choice."""
        group = self._groups[len(self._trail)]
        rest = self._increments.relaxation(len(self._trail) + 1)
        bytes_ = np.add.outer(self._bytes, group.bytes).ravel()
        seconds = np.add.outer(self._seconds, group.seconds).ravel()
        room = self._total - bytes_
        bounds = np.where(room >= rest.bytes[0], seconds + rest.least(room), np.inf)
        alive = bounds < self.best * (1 - _ROUNDING)
        left = np.flatnonzero(alive)[_undominated(bytes_[alive], seconds[alive])]
        self._bytes, self._seconds = bytes_[left], seconds[left]
        self._trail.append(np.divmod(left, len(group.bytes)))
        if not len(left):
            return
        self.bound = float(bounds[left].min())
        rounded, corners = rest.rounded(self._total - self._bytes)
        complete = self._seconds + rounded
        state = int(complete.argmin())
        if complete[state] < self.best:
            self.best = float(complete[state])
            self.choice = self._items(state) + rest.items(len(self._groups), int(corners[state]))[len(self._trail) :]

    def _items(self, state: int) -> list[int]:
        """The items of a partial choice."""
        items: list[int] = []
        for parents, chosen in reversed(self._trail):
            items.append(int(chosen[state]))
            state = int(parents[state])
        return items[::-1]


def _undominated(bytes_: Integers, seconds: Numbers) -> Integers:
    """The indices of the pairs that no other pair dominates in bytes and seconds, in ascending bytes."""
    order = np.lexsort((seconds, bytes_))
    least = np.minimum.accumulate(seconds[order])
    return order[np.append(True, least[1:] < least[:-1])[: len(order)]]
