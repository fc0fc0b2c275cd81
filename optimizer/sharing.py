"""Workspace division (WD): finds the fastest divisions of many convolutions whose workspaces together fit a total.

This is a multiple-choice knapsack: one item of every group within a total of bytes, in provably the least time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mucudnn.optimizer.reuse import Item, desirable_set

Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

TIME_LIMIT = 60.0
"""Seconds after which the best choice known is taken: an optimum is proven in milliseconds but for contrived inputs."""

_ROUNDING = 1e-12
"""A choice better by a smaller fraction is not searched for: sums of floating-point seconds are no more exact."""


def share(kernels: Sequence[Sequence[Item]], total: float) -> list[Item]:
    """The fastest choice of one division for each kernel whose workspaces add up to `total` at most.

    Minimises the sum of T_kc x_kc over the kernels k and their divisions c, subject to one c per k and the sum of
    M_kc x_kc within the total (WD, mu-cuDNN, Oyama et al. 2018, section III-C).

    Args:
        kernels: for each, divisions to choose from; those that another dominates are never chosen.
        total: bytes that all workspaces may take together; `math.inf` for no limit.

    Returns:
        The divisions in the order of the kernels: an optimum, unless it is not proven in `TIME_LIMIT`.

    Raises:
        ValueError: for a kernel without divisions, and for a total that no choice fits, naming the smallest that does.
    """
    menus = [desirable_set(kernel) for kernel in kernels]
    for number, menu in enumerate(menus):
        if not menu:
            raise ValueError(f"kernels[{number}] has no divisions: it takes at least one")
    smallest = sum(menu[0].workspace for menu in menus)
    if total < smallest:
        raise ValueError(f"total={total}: these {len(menus)} kernels fit no total below {smallest} bytes")
    if not menus:
        return []
    room = int(min(total, sum(menu[-1].workspace for menu in menus)))
    sizes = [np.array([division.workspace for division in menu], dtype=np.int64) for menu in menus]
    seconds = [np.array([division.seconds for division in menu]) for menu in menus]
    return [menu[item] for menu, item in zip(menus, _fastest(sizes, seconds, room), strict=True)]


def _fastest(sizes: Sequence[Integers], seconds: Sequence[Numbers], total: int) -> list[int]:
    """An item of each group.

    At a price for each byte every group has a best item, and no choice takes less than these with their price, less
    that of the total (Lagrangian relaxation). What the items of a choice cost above the best ones of their groups adds
    up to its distance from that bound. A sweep over the groups keeps every partial choice that no other dominates in
    bytes and seconds and whose distance is less than that of the best complete choice known, to which the usual items
    of the other groups complete a partial one. (Dynamic programming with bounds, as in Pisinger, "A minimal algorithm
    for the multiple-choice knapsack problem", 1995.)
    """
    groups, deadline = range(len(sizes)), time.monotonic() + TIME_LIMIT
    price, usual = _relaxed(sizes, seconds, total)
    costs = [took + price * size for size, took in zip(sizes, seconds, strict=True)]
    bound = math.fsum(float(cost.min()) for cost in costs) - price * total
    chosen = _filled(sizes, seconds, usual, total)
    best = math.fsum(float(seconds[at][chosen[at]]) for at in groups)
    kept = [np.flatnonzero(cost - cost.min() <= max(best - bound, 0.0) * (1 + 1e-6)) for cost in costs]
    # The groups whose items differ most in bytes come first: what is left then completes partial choices well.
    order = sorted(groups, key=lambda at: -int(np.ptp(sizes[at][kept[at]])))
    usual_ones = [(sizes[at][0], sizes[at][usual[at]], seconds[at][usual[at]], costs[at].min()) for at in order]
    # Sums over each group and all after it: the least bytes, and the bytes, seconds and costs of the usual items.
    rest = np.cumsum([(0, 0, 0, 0), *reversed(usual_ones)], axis=0)[::-1]
    bytes_, took = np.zeros(1, dtype=np.int64), np.zeros(1)
    trail: list[tuple[Integers, Integers]] = []
    for number, at in enumerate(order):
        if time.monotonic() > deadline:
            break
        least, usual_bytes, usual_seconds, least_cost = rest[number + 1]
        bytes_, took = (np.add.outer(a, b[kept[at]]).ravel() for a, b in ((bytes_, sizes[at]), (took, seconds[at])))
        bounds = took + price * bytes_ + least_cost - price * total
        alive = np.flatnonzero((bytes_ + least <= total) & (bounds < best * (1 - _ROUNDING)))
        alive = alive[_undominated(bytes_[alive], took[alive])]
        if not len(alive):
            break
        bytes_, took = bytes_[alive], took[alive]
        trail.append(np.divmod(alive, len(kept[at])))
        complete = np.where(bytes_ + usual_bytes <= total, took + usual_seconds, np.inf)
        state = int(complete.argmin())
        if complete[state] < best:
            best, chosen = float(complete[state]), list(usual)
            for place, (parents, items) in zip(order[number::-1], reversed(trail), strict=True):
                chosen[place] = int(kept[place][items[state]])
                state = int(parents[state])
    return chosen


def _relaxed(sizes: Sequence[Integers], seconds: Sequence[Numbers], total: int) -> tuple[float, list[int]]:
    """The seconds that a byte more would save, and items that cost least at this price and fit the total together.

    From the lightest items on, what saves most seconds per byte is taken first, along the lower convex hulls.
    """
    steps = []
    for at, (size, took) in enumerate(zip(sizes, seconds, strict=True)):
        item = 0
        while item < len(size) - 1:
            slopes = (took[item] - took[item + 1 :]) / (size[item + 1 :] - size[item])
            after = item + 1 + int(len(slopes) - 1 - slopes[::-1].argmax())
            steps.append((float(slopes.max()), at, item, after))
            item = after
    usual, room = [0] * len(sizes), total - sum(int(size[0]) for size in sizes)
    for price, at, item, after in sorted(steps, key=lambda step: -step[0]):
        room -= int(sizes[at][after] - sizes[at][item])
        if room < 0:
            return price, usual
        usual[at] = after
    return 0.0, usual


def _filled(sizes: Sequence[Integers], seconds: Sequence[Numbers], usual: Sequence[int], total: int) -> list[int]:
    """A choice within the total: heavier items in the place of some, those first that save most seconds."""
    chosen, room = list(usual), total - sum(int(size[item]) for size, item in zip(sizes, usual, strict=True))
    for at in sorted(range(len(sizes)), key=lambda at: seconds[at][-1] - seconds[at][usual[at]]):
        heaviest = int(np.searchsorted(sizes[at], sizes[at][chosen[at]] + room, side="right")) - 1
        room -= int(sizes[at][heaviest] - sizes[at][chosen[at]])
        chosen[at] = heaviest
    return chosen


def _undominated(bytes_: Integers, seconds: Numbers) -> Integers:
    """The indices of the pairs that no other pair dominates in bytes and seconds, in ascending bytes."""
    order = np.lexsort((seconds, bytes_))
    least = np.minimum.accumulate(seconds[order])
    return order[np.append(True, least[1:] < least[:-1])[: len(order)]]
