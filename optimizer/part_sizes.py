"""Part sizes: which sizes of parts keep a limit, where it is costly to ask what a part needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MOST_ATTEMPTS = 4
"""Sizes between the smallest and the whole that are asked for while the largest that fits is looked for."""


class PartSizes:
    """The sizes of an algorithm's parts, and the bytes that these need.

    What is not asked for is interpolated between the sizes that were: expected bytes tell what is worth asking for, and
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

    def fits(self, size: int) -> bool:
        """Whether parts of a size are served within the limit; it is asked for."""
        return self._need(size) <= self._limit

    @property
    def fitting(self) -> dict[int, int]:
        """{size: bytes} of all that was asked for and fits."""
        return {size: int(need) for size, need in self._needs.items() if need <= self._limit}

    def is_expected(self, size: int) -> bool:
        """Whether parts of a size are expected to fit, as far as was asked."""
        return self.expected(size) <= self._limit

    def expected(self, size: int) -> float:
        """The bytes that parts of a size are expected to need: 0 before anything was asked, infinite where no part as
        small is served."""
        if size in self._needs:
            return self._needs[size]
        below = max((other for other in self._needs if other < size), default=None)
        above = min((other for other in self._needs if other > size), default=None)
        if below is None:
            return 0.0 if above is None or self._needs[above] == math.inf else self._needs[above] * size / above
        low = self._needs[below]
        if low == math.inf:
            return math.inf
        if above is None or self._needs[above] == math.inf:
            return low * size / below
        return low + (self._needs[above] - low) * (size - below) / (above - below)

    def largest(self) -> int | None:
        """The largest size that fits; `None` where none does, not even the smallest.

        Few sizes are asked for: the largest one; if that does not fit, the smallest; then those between, from the
        largest one that is expected to fit.
        """
        if not self.sizes:
            return None
        if self.fits(self.sizes[-1]):
            return self.sizes[-1]
        if not self.fits(self.sizes[0]):
            return None
        for _ in range(MOST_ATTEMPTS):
            between = (size for size in reversed(self.sizes) if size not in self._needs and self.is_expected(size))
            size = next(between, self.sizes[0])
            if self.fits(size):
                return size
        return self.sizes[0]

    def _need(self, size: int) -> float:
        if size not in self._needs:
            need = self._ask(size)
            self._needs[size] = math.inf if need is None else need
        return self._needs[size]
