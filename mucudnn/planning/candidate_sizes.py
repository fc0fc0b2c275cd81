"""Candidate sizes: which sizes of parts of a candidate are tried, and which of them fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from mucudnn.convolution.problem import Dim
from mucudnn.convolution.tile import extent
from mucudnn.optimizer import micro_batch_sizes
from mucudnn.providers import STOCK
from mucudnn.timing.measurement import Candidate, Measurement


class Sizes:
    """The sizes of parts that a policy tries.

    Attributes:
        all: in ascending order, whether they fit or not.
        few: of these, the powers of two, the whole and, along space, the even tiles; in ascending order.
        smallest: the smallest power of two, or the whole, that fits; `None` where none does.
    """

    def __init__(self, measurement: Measurement, candidate: Candidate, dim: Dim, allowed: float, policy: str) -> None:
        self._measurement, self._candidate, self._dim, self._allowed = measurement, candidate, dim, allowed
        whole = extent(measurement.problem, dim)
        sizes = set(micro_batch_sizes(policy, whole))
        if candidate[1] == STOCK or dim is not Dim.BATCH:
            sizes.discard(whole)
        self.few: Sequence[int] = sorted(sizes.intersection(micro_batch_sizes("powerOfTwo", whole)))
        self.smallest = next(filter(self.fits, self.few), None)
        if dim is not Dim.BATCH and self.smallest is not None:
            # Tiles overlap, so the best use of the limit is as few tiles as possible, of equal size.
            most = self.largest(lambda size: True) or self.smallest
            largest = bisect_left(range(whole), True, lo=most + 1, key=lambda size: not self.fits(size)) - 1
            even = -(-whole // -(-whole // largest))
            if self.fits(even):
                sizes.add(even)
                self.few = sorted({*self.few, even})
        self.all = sorted(sizes)

    def fitting(self, sizes: Iterable[int]) -> dict[int, int]:
        """{size: bytes of workspace}, for those of the sizes whose parts the candidate serves within the limit."""
        needs = {size: self._measurement.workspace(self._candidate, self._dim, size) for size in sizes}
        return {size: need for size, need in needs.items() if need is not None and need <= self._allowed}

    def fits(self, size: int) -> bool:
        """Whether the candidate serves parts of a size within the limit."""
        workspace = self._measurement.workspace(self._candidate, self._dim, size)
        return workspace is not None and workspace <= self._allowed

    def largest(self, is_wanted: Callable[[int], bool]) -> int | None:
        """The largest of the few sizes that is wanted and fits."""
        return next((size for size in reversed(self.few) if is_wanted(size) and self.fits(size)), None)
