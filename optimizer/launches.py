"""Launches: the algorithms that may compute a convolution, with measured and expected times of their launches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mucudnn.optimizer.option import Division, Key, Option
from mucudnn.optimizer.reuse import best_division

TREND, MOST_GAIN = 1.5, 2.25
"""Per sample, a launch of twice or half the size is at most `TREND` times as fast, of any size `MOST_GAIN` times."""

BETWEEN = 1.1
"""Per sample, a launch of a size between two measured ones is at most so many times as fast as the faster of these."""

ENOUGH, CLEAR = 0.25, 3.0
"""Once a division takes at most this share of the baseline, an algorithm that was never tried must be expected to beat
it, where its forecast is no more uncertain than `CLEAR`; before, it need only be possible."""

VAGUE = 2.25  # If a forecast is more uncertain than this factor, the smallest informative launch is tried first.

LAUNCHING = 1e-3
"""The expected time of a launch of the baseline's algorithm beside its work, in units of the baseline."""

SHARE = 4
"""The first trial of an algorithm computes at least 1/SHARE of the whole, where its workspace allows that: the time of
a much smaller part says little."""


@dataclass(frozen=True)
class Variant:
    """An algorithm whose launches compute parts along one dim.

    Attributes:
        extent: of the whole along the dim.
        workspaces: {size of a part: bytes}, for the sizes that may be tried.
        seconds: expected time of the whole.
        uncertainty: the factor, at least 1, within which the expected time is nearly surely right.
        rests: for the baseline only, {size: bytes} of what is left of the whole beside a part of another variant.
        least: {size: seconds} that the whole takes at least in parts of a size, whatever was timed; where it is known.
    """

    dim: str
    algorithm: str
    extent: int
    workspaces: Mapping[int, int]
    seconds: float
    uncertainty: float = 1.0
    rests: Mapping[int, int] = field(default_factory=dict)
    least: Mapping[int, float] = field(default_factory=dict)


class Launches:
    """The launches of all variants, with their measured times.

    Attributes:
        variants: those that have a size to try.
        seconds: {launch: every time that was measured}.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        baseline: str,
        seconds: dict[Key, list[float]] | None = None,
        smallest_first: bool = False,
    ) -> None:
        """
        Args:
            baseline: the algorithm that computes the rest of a call beside a trial.
            seconds: {launch: times measured before}; new times are added to it.
            smallest_first: whether the first launch of an algorithm is the smallest informative one.
        """
        self.variants = [variant for variant in variants if variant.workspaces]
        self.seconds: dict[Key, list[float]] = {} if seconds is None else seconds
        self._baseline, self._smallest_first = baseline, smallest_first
        self._failed: dict[tuple[str, str], int] = {}

    @property
    def workspace(self) -> int:
        """The most bytes that any launch may need."""
        needs = (
            bytes for variant in self.variants for bytes in (*variant.workspaces.values(), *variant.rests.values())
        )
        return max(needs, default=0)

    def is_timed(self, dim: str, algorithm: str) -> bool:
        """Whether a launch of an algorithm along a dim is known."""
        return any(key[:2] == (dim, algorithm) for key in self.seconds)

    def fail(self, dim: str, algorithm: str, extent: int) -> None:
        """Excludes an algorithm from the extent at which it failed upwards."""
        key = dim, algorithm
        self._failed[key] = min(extent, self._failed.get(key, extent))

    def options(self, dim: str) -> list[Option]:
        """The launches that may be used along a dim, with their measured seconds."""
        return [
            Option(size, variant.algorithm, statistics.median(times), variant.workspaces[size])
            for variant in self.variants
            if variant.dim == dim
            for size in self._sizes(variant)
            if (times := self.seconds.get((dim, variant.algorithm, size)))
        ]

    def wholes(self) -> Iterator[Division]:
        """Divisions into measured launches. Along each dim: the fastest, the fastest without the algorithms of the
        first, and the fastest that computes the whole in one launch."""
        for dim, extent in {variant.dim: variant.extent for variant in self.variants}.items():
            options = self.options(dim)
            first = best_division(options, extent, math.inf, dim)
            used = set() if first is None else {option.algorithm for option in first.options}
            others = [option for option in options if option.algorithm not in used]
            whole = [option for option in options if option.extent == extent]
            found = first, *(best_division(some, extent, math.inf, dim) for some in (others, whole))
            yield from (division for division in found if division is not None)

    def trials(self, bar: Callable[[str], float], baseline: float, best: float = math.inf) -> Iterator[Division]:
        """Divisions for one call, each to measure a size of a variant that is worth it, the most informative first.

        The variant with the smallest lower bound comes first: as a rule the one that is known least. Sizes are pruned
        if they cannot be part of a faster division, even with the most favourable trend over sizes. Of each variant
        powers of two come first.

        Args:
            bar: seconds of the whole that launches of an algorithm must beat.
            baseline: seconds of the whole by the baseline.
            best: by the fastest division so far.
        """
        bounded: list[tuple[float, Variant, list[int]]] = []
        clear = CLEAR if best <= ENOUGH * baseline else 1.0
        for variant in self.variants:
            known = self._known(variant)
            left = (size for size in self._sizes(variant) if size not in known)
            bounds = {size: self._lower_bound(variant, size, known, clear) for size in left}
            most = bar(variant.algorithm)
            wanted = [size for size, seconds in bounds.items() if seconds < most]
            if wanted:
                powers = [size for size in wanted if size.bit_count() == 1]
                bounded.append((min(bounds.values()), variant, powers or wanted))
        for _, variant, wanted in sorted(bounded, key=lambda one: one[0]):
            for size in self._starts(variant, wanted):
                division = self._division(variant, size, baseline)
                if division is not None:
                    yield division

    def _sizes(self, variant: Variant) -> list[int]:
        """The sizes in ascending order, without those at which the algorithm failed."""
        failed = self._failed.get((variant.dim, variant.algorithm), math.inf)
        return sorted(size for size in variant.workspaces if size < failed)

    def _known(self, variant: Variant) -> dict[int, float]:
        """Seconds of the whole in parts of each measured size."""
        times = {size: self.seconds.get((variant.dim, variant.algorithm, size)) for size in variant.workspaces}
        return {size: statistics.median(found) * variant.extent / size for size, found in times.items() if found}

    def _expected(self, variant: Variant, size: int) -> float:
        """Expected seconds of the whole in parts of a size, from the nearest measured size."""
        known = self._known(variant)
        expected = known[_nearest(known, size)] if known else self._forecast(variant)[0]
        return max(expected, variant.least.get(size, 0.0))

    def _forecast(self, variant: Variant, clear: float = 1.0) -> tuple[float, float]:
        """Expected seconds of the whole by a variant that was not tried yet, and their uncertainty. They come from the
        algorithm's times along another dim, where it has any."""
        others = (other for other in self.variants if other.algorithm == variant.algorithm and other is not variant)
        known = [seconds for other in others for seconds in self._known(other).values()]
        if known:
            return min(known), min(variant.uncertainty, MOST_GAIN)
        return variant.seconds, 1.0 if variant.uncertainty <= clear else variant.uncertainty

    def _lower_bound(self, variant: Variant, size: int, known: Mapping[int, float], clear: float) -> float:
        """The least seconds that the whole may take with launches of a size, by those of the measured sizes.

        ``clear``: a forecast of what was tried along no dim is taken at its word if it is no more uncertain than this.
        """
        least = variant.least.get(size, 0.0)
        if not known:
            seconds, uncertainty = self._forecast(variant, clear)
            return max(seconds / uncertainty, least)
        nearest = _nearest(known, size)
        gain = min(TREND ** abs(math.log2(size / nearest)), MOST_GAIN)
        if min(known) < size < max(known):
            beside = max(n for n in known if n < size), min(n for n in known if n > size)
            return max(min(known[n] for n in beside) / min(gain, BETWEEN), least)
        return max(known[nearest] / gain, least)

    def _starts(self, variant: Variant, wanted: Sequence[int]) -> Sequence[int]:
        """The sizes of which one is measured next, the most informative first; later ones cost less."""
        if self._known(variant):
            return wanted[-1:]
        large = [size for size in wanted if size * SHARE >= variant.extent] or wanted[-1:]
        return large if self._smallest_first or self._forecast(variant)[1] > VAGUE else large[::-1]

    def _division(self, variant: Variant, size: int, baseline: float) -> Division | None:
        """A division of the whole with a launch of the size; `None` where nothing can compute the rest."""
        tried, left = self._option(variant, size), variant.extent - size
        if left == 0:
            return Division((tried,), variant.dim)
        # Without sizes that were never timed, except the one that is tried: many small launches may take far longer.
        sizes, known = self._sizes(variant), self._known(variant)
        others = [self._option(variant, other) for other in sizes if other == size or other in known]
        for other in self.variants:
            if (other.dim, other.algorithm) == (variant.dim, self._baseline):
                # A launch takes something by itself, so that a few large parts are better than many small ones.
                share, each = baseline / variant.extent, LAUNCHING * baseline
                needs = other.workspaces
                others += [Option(n, self._baseline, n * share + each, needs[n]) for n in self._sizes(other)]
                if left in other.rests:
                    others.append(Option(left, self._baseline, left * share, other.rests[left]))
        rest = best_division(others, left, math.inf)
        if rest is None:
            rest = best_division([self._option(variant, other) for other in sizes], left, math.inf)
        return None if rest is None else Division((tried, *rest.options), variant.dim)

    def _option(self, variant: Variant, size: int) -> Option:
        return Option(
            size, variant.algorithm, self._expected(variant, size) * size / variant.extent, variant.workspaces[size]
        )


def _nearest(sizes: Iterable[int], size: int) -> int:
    return min(sizes, key=lambda n: abs(math.log2(size / n)))
