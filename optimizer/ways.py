"""Ways: the algorithms that a convolution could be computed by, and what is known and expected of their launches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mucudnn.optimizer.option import Division, Option
from mucudnn.optimizer.reuse import best_division

TREND, MOST_GAIN = 2.0, 4.0
"""Per sample, a launch of twice or half the size is at most `TREND` times as fast, of any size `MOST_GAIN` times."""

SHARE = 4
"""An algorithm is first tried on at least a part of 1/SHARE of the whole, where its workspace allows that: what it
takes on a much smaller part says little."""


@dataclass(frozen=True)
class Way:
    """An algorithm along a dim.

    Attributes:
        extent: of the whole along the dim.
        workspaces: bytes by the size of a part, of the sizes that may be tried.
        seconds: that the whole is expected to take.
        doubt: the factor, at least 1, within which that is nearly sure.
        rests: of the baseline, bytes by what is left of the whole after a part of another way, where it serves that.
    """

    dim: str
    algorithm: str
    extent: int
    workspaces: Mapping[int, int]
    seconds: float
    doubt: float = 1.0
    rests: Mapping[int, int] = field(default_factory=dict)


Key = tuple[str, str, int]
"""(dim, algorithm, size) of a launch."""


class Launches:
    """Launches of all ways, with the times that were seen.

    Attributes:
        ways: those that have a size to try.
        seconds: by launch, every time it was seen.
    """

    def __init__(self, ways: Sequence[Way], baseline: str, seconds: dict[Key, list[float]] | None = None) -> None:
        """
        Args:
            baseline: the algorithm that computes what a trial leaves.
            seconds: by launch, the times that were seen before; what is seen from now on is added.
        """
        self.ways = [way for way in ways if way.workspaces]
        self.seconds: dict[Key, list[float]] = {} if seconds is None else seconds
        self._baseline = baseline
        self._correction: dict[tuple[str, str], float] = {}
        self._failed: dict[tuple[str, str], int] = {}

    @property
    def workspace(self) -> int:
        """Bytes that any of them may need."""
        needs = (bytes for way in self.ways for bytes in (*way.workspaces.values(), *way.rests.values()))
        return max(needs, default=0)

    def fail(self, dim: str, algorithm: str, extent: int) -> None:
        """Leaves out an algorithm that failed at an extent, there and above."""
        key = dim, algorithm
        self._failed[key] = min(extent, self._failed.get(key, extent))

    def correct(self, dim: str, division: Division, seconds: float) -> None:
        """Notes what a division took as a whole: its algorithms count as slower where they were faster alone."""
        factor = seconds / max(division.seconds, 1e-12)
        for algorithm in {option.algorithm for option in division.options}:
            known = self._correction.get((dim, algorithm), 1.0)
            self._correction[dim, algorithm] = max(known, known * factor)

    def options(self, dim: str) -> list[Option]:
        """The launches along a dim that may be used, with the seconds they take as parts of a whole."""
        factors = self._correction
        found = self.measured(dim)
        return [replace(o, seconds=factors.get((dim, o.algorithm), 1.0) * o.seconds) for o in found]

    def measured(self, dim: str) -> list[Option]:
        """The launches along a dim that may be used, with the seconds that they took."""
        return [
            Option(size, way.algorithm, seconds, way.workspaces[size])
            for way in self.ways
            if way.dim == dim
            for size in self._sizes(way)
            if (seconds := self._seen(way, size)) is not None
        ]

    def wholes(self) -> Iterator[tuple[str, Division]]:
        """Divisions of what is known: along each dim the fastest, that without the algorithms of the fastest, and the
        fastest that takes the whole at once."""
        for dim, extent in {way.dim: way.extent for way in self.ways}.items():
            options = self.options(dim)
            found = [best_division(options, extent, math.inf)]
            if found[0] is not None:
                used = {option.algorithm for option in found[0].options}
                found.append(best_division([o for o in options if o.algorithm not in used], extent, math.inf))
            found.append(best_division([option for option in options if option.extent == extent], extent, math.inf))
            yield from ((dim, division) for division in found if division is not None)

    def trials(self, best: float, baseline: float) -> Iterator[list[tuple[str, Division]]]:
        """For every way of which more should be known, what would tell it in one call, the most telling first.

        The way of which the most may be hoped comes first, and that is what is least known. What could not be part of
        anything faster, even if the trend over sizes were as good as it ever is, is left out.

        Args:
            best: seconds of the whole that are to be beaten.
            baseline: seconds of the whole by the baseline.
        """
        hopes: list[tuple[float, Way, list[int]]] = []
        for way in self.ways:
            hoped = {size: self._hoped(way, size) for size in self._sizes(way) if not self._is_known(way, size)}
            wanted = [size for size, seconds in hoped.items() if seconds < best]
            if wanted:
                hopes.append((min(hoped.values()), way, wanted))
        for _, way, wanted in sorted(hopes, key=lambda hope: hope[0]):
            divisions = [self._division(way, sizes, baseline) for sizes in self._starts(way, wanted)]
            found = [(way.dim, division) for division in divisions if division is not None]
            if found:
                yield found

    def fastest(self) -> dict[str, float]:
        """The least seconds of the whole by each algorithm that was tried."""
        found: dict[str, float] = {}
        for way in self.ways:
            for size in way.workspaces:
                seconds = self._seen(way, size)
                if seconds is not None:
                    whole = seconds * way.extent / size
                    found[way.algorithm] = min(whole, found.get(way.algorithm, whole))
        return found

    def _sizes(self, way: Way) -> list[int]:
        """Ascending, without those at which the algorithm failed."""
        failed = self._failed.get((way.dim, way.algorithm), math.inf)
        return sorted(size for size in way.workspaces if size < failed)

    def _seen(self, way: Way, size: int) -> float | None:
        times = self.seconds.get((way.dim, way.algorithm, size))
        return statistics.median(times) if times else None

    def _nearest(self, way: Way, size: int) -> int | None:
        """The size that is known and next to another."""
        known = [n for n in way.workspaces if self._is_known(way, n)]
        return min(known, key=lambda n: abs(math.log2(size / n)), default=None)

    def _expected(self, way: Way, size: int) -> float:
        """Seconds of the whole in parts of a size, by the size next to it that is known."""
        known = self._nearest(way, size)
        seen = None if known is None else self._seen(way, known)
        return self._forecast(way)[0] if known is None or seen is None else seen * way.extent / known

    def _forecast(self, way: Way) -> tuple[float, float]:
        """Seconds of the whole by a way that was not tried yet, and the doubt: by what its algorithm takes along
        another dim, where that is known."""
        others = [other for other in self.ways if other.algorithm == way.algorithm and other is not way]
        known = [
            seconds * other.extent / size
            for other in others
            for size in other.workspaces
            if (seconds := self._seen(other, size)) is not None
        ]
        return (min(known), min(way.doubt, MOST_GAIN)) if known else (way.seconds, way.doubt)

    def _is_known(self, way: Way, size: int) -> bool:
        return (way.dim, way.algorithm, size) in self.seconds

    def _hoped(self, way: Way, size: int) -> float:
        """The least seconds of the whole that a launch of a size could be part of."""
        known = self._nearest(way, size)
        if known is None:
            seconds, doubt = self._forecast(way)
            return seconds / doubt
        gain = TREND ** abs(math.log2(size / known))
        return self._expected(way, size) / min(gain, MOST_GAIN)

    def _starts(self, way: Way, wanted: Sequence[int]) -> Iterator[list[int]]:
        """Sizes for one call, the most telling first; what comes later costs less."""
        if self._nearest(way, wanted[0]) is None:
            large = [size for size in wanted if size * SHARE >= way.extent] or wanted[-1:]
            yield from ([size] for size in reversed(large))
            return
        taken, left = [], way.extent
        for size in reversed(wanted):
            if size <= left:
                taken.append(size)
                left -= size
        yield taken
        yield taken[-1:]

    def _division(self, way: Way, sizes: Sequence[int], baseline: float) -> Division | None:
        """A division of the whole that has launches of the sizes; `None` where what is left cannot be computed."""
        options = [self._option(way, size) for size in sizes]
        left = way.extent - sum(sizes)
        if left == 0:
            return Division(tuple(options))
        others = [self._option(way, size) for size in self._sizes(way)]
        for other in self.ways:
            if (other.dim, other.algorithm) == (way.dim, self._baseline):
                share = baseline / way.extent
                sizes = self._sizes(other)
                others += [Option(size, self._baseline, size * share, other.workspaces[size]) for size in sizes]
                if left in other.rests:
                    others.append(Option(left, self._baseline, left * share, other.rests[left]))
        rest = best_division(others, left, math.inf)
        return None if rest is None else Division((*options, *rest.options))

    def _option(self, way: Way, size: int) -> Option:
        return Option(size, way.algorithm, self._expected(way, size) * size / way.extent, way.workspaces[size])
