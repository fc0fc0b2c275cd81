"""Part sizes: which sizes of parts keep a limit, where it is costly to ask what a part needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MOST_ATTEMPTS = 4
"""Sizes between the smallest and the whole that are asked for while the largest that fits is looked for."""


class PartSizes:
    """The sizes of an algorithm's parts, and the bytes that these need.

    What is not asked for is interpolated between the sizes that were: expected bytes show what is worth asking for, and
    are never a promise, since the needs of some algorithms neither grow steadily nor grow at all.

    Attributes:
        sizes: in ascending order.
    """

    def __init__(self, sizes: Sequence[int], limit: float, ask: Callable[[int], int | None]) -> None:
        """
        Args:
            sizes: in ascending order.
            limit: bytes.
            ask: the bytes that parts of a size need; `None` where the algorithm does not serve them.
        """
        self.sizes = sizes
        self._limit, self._ask = limit, ask
        self._needs: dict[int, float] = {}

    def need(self, size: int) -> float:
        """The bytes that parts of a size need, infinite where they are not served; it is asked for once."""
        if size not in self._needs:
            need = self._ask(size)
            self._needs[size] = math.inf if need is None else need
        return self._needs[size]

    @property
    def fitting(self) -> dict[int, int]:
        """{size: bytes} of all that was asked for and fits."""
        return {size: int(need) for size, need in self._needs.items() if need <= self._limit}

    def expected(self, size: int) -> float:
        """The bytes that parts of a size are expected to need: between those of the next known sizes."""
        if size in self._needs:
            return self._needs[size]
        below = max((other for other in self._needs if other < size), default=0)
        above = min((other for other in self._needs if other > size), default=size)
        low, high = self._needs.get(below, 0.0), self._needs.get(above, math.inf)
        if math.inf in (low, high):
            return low * size / max(below, 1)
        return low + (high - low) * (size - below) / (above - below)

    def largest(self) -> int | None:
        """The largest size that fits; `None` where none does, not even the smallest.

        Few sizes are asked for: the largest one; if that does not fit, the smallest; then those between, from the
        largest one that is expected to fit.
        """
        if not self.sizes:
            return None
        if self.need(self.sizes[-1]) <= self._limit:
            return self.sizes[-1]
        if self.need(self.sizes[0]) > self._limit:
            return None
        for _ in range(MOST_ATTEMPTS):
            between = (size for size in reversed(self.sizes) if size not in self._needs)
            size = next((size for size in between if self.expected(size) <= self._limit), self.sizes[0])
            if self.need(size) <= self._limit:
                return size
        return self.sizes[0]
