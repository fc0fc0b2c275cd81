"""A row of items divided into segments that cost the least together."""

from __future__ import annotations

import math
from collections.abc import Callable


def cheapest(count: int, cost: Callable[[int, int], float]) -> list[int]:
    """The first item of each segment, ascending; the first is 0. Of equal costs, the fewest segments.

    ``cost(i, j)``: of the segment of items i to j - 1; infinite where they may not be one, and then for longer segments
    from i on, too, which are not asked for. Single items cost a finite amount.
    """
    best: list[tuple[float, int]] = [(0.0, 0)] + [(math.inf, 0)] * count
    begins = [0] * (count + 1)
    for i in range(count):
        for j in range(i + 1, count + 1):
            own = cost(i, j)
            if own == math.inf:
                break
            total = best[i][0] + own, best[i][1] + 1
            if total < best[j]:
                best[j], begins[j] = total, i
    found: list[int] = []
    at = count
    while at:
        at = begins[at]
        found.append(at)
    return found[::-1]
