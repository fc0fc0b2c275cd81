"""Frugal search: a search for where every question for a workspace makes a plan, and every plan takes milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from mucudnn.convolution.problem import Dim
from mucudnn.convolution.tile import dims, extent
from mucudnn.optimizer import Costs, Option, PartSizes, micro_batch_sizes, missing
from mucudnn.planning.offers import Offers
from mucudnn.planning.plan_budget import PlanBudget
from mucudnn.planning.search import Search
from mucudnn.providers import STOCK
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.form import is_too_large
from mucudnn.timing.measurement import Candidate, Measurement
from mucudnn.timing.survey import Task

Further = Callable[[Measurement, float, Sequence[str]], Sequence[Task]]
"""What is to be tried, within so many bytes, of algorithms that one sample is too large for."""

MOST_FURTHER = 6
"""Sizes of an algorithm that are timed after its first one."""


class FrugalSearch(Search):
    """The launches of one problem that are worth a plan.

    What cannot win by the cost model is not even asked for its workspace. Of an algorithm the largest part that fits is
    timed first, and a smaller one only if it may be faster than all launches so far, of whatever algorithm.
    """

    def __init__(
        self,
        measurement: Measurement,
        costs: Costs,
        allowed: float,
        policy: str,
        plans_made: Callable[[], int],
        compares_workspaces: bool,
    ) -> None:
        """
        Args:
            plans_made: how many plans cuDNN was asked for so far.
            compares_workspaces: whether what is slower than another launch, if faster than torch's own kernel, is of
                interest for a smaller workspace; then as many micro-batches are asked for as that takes.
        """
        super().__init__(measurement, costs, allowed, policy)
        self._compares_workspaces = compares_workspaces
        self._timed_so_far: list[tuple[float, float]] = []
        """Seconds of the whole, and bytes, of every launch."""
        self._budget = PlanBudget(measurement.problem, plans_made)

    def options(self, candidate: Candidate, dim: Dim) -> Iterator[Option]:
        """The candidate's launches along a dim: those that are known, then those that are worth a plan."""
        self._budget.begin(candidate[1])
        whole = extent(self._problem, dim)
        sizes = set(micro_batch_sizes(self._policy, whole))
        if candidate[1] == STOCK or dim is not Dim.BATCH:
            sizes.discard(whole)
        if not sizes:
            return

        def ask(size: int) -> int | None:
            return self._measurement.workspace(candidate, dim, size) if self._may_ask(dim) else None

        tried, seen = PartSizes(sorted(sizes), self._allowed, ask), dict[int, float]()
        for size in tried.sizes:
            if self._measurement.is_known(candidate, dim, size):
                yield from self._noted(candidate, dim, size, seen)
        for _ in range(1 + MOST_FURTHER):
            following = self._following(candidate, dim, tried, seen)
            if following is None:
                break
            yield from self._noted(candidate, dim, following, seen)
        # Parts that are fast are of use only where others complete them to the whole.
        if min(seen.values(), default=math.inf) < super()._bar(candidate[1]) * self._stock_seconds:
            timed = [size for size, seconds in seen.items() if seconds < math.inf]
            for size in missing(whole, tried.sizes, timed):
                if tried.fits(size):
                    yield from self._noted(candidate, dim, size, seen)

    def chosen(self, candidate: Candidate, dim: Dim, sizes: Iterable[int]) -> Iterator[Option]:
        """The candidate's launches of sizes that an earlier search has chosen."""
        for size in sizes:
            yield from self._noted(candidate, dim, size, {})

    def rounds(
        self, offers: Offers, sizes: Mapping[str, Sequence[int]] | None, found: Mapping[Task, Sequence[Option]]
    ) -> Iterator[dict[Task, Candidate]]:
        """Micro-batches; then micro-tiles and strips, where one sample is too large. All processes agree on them."""
        if sizes is not None:
            pairs = (task.split(" ", 1) for task, chosen in sizes.items() if chosen)
            yield offers.named(self._problem, [(Dim(dim), name) for dim, name in pairs])
            return
        candidates = offers.along_batch(self._problem)
        self._budget.wait(candidates.values())
        yield candidates
        for _, name in candidates:
            self._budget.begin(name)  # those that other processes have measured
        for what, further in {"tiles": offers.along_space, "strips": offers.in_strips}.items():
            served = {name for (_, name), options in found.items() if options}
            tasks = self._agreed(what, further, [one for one in candidates.values() if one[1] not in served])
            yield offers.named(self._problem, tasks)

    def _agreed(self, what: str, further: Further, left: Sequence[Candidate]) -> list[Task]:
        """What one of the processes that share the board finds that is to be tried further of candidates."""
        logbook = self._measurement.logbook
        key = {**logbook.key(self._problem), "extent": self._problem.extent, "limit": self._allowed}
        found = logbook.board.once(
            {**key, "work": f"what is too large, in {what}"},
            lambda: further(self._measurement, self._allowed, self._too_large(left)),
        )
        return [(Dim(dim), name) for dim, name in found]

    def _too_large(self, candidates: Iterable[Candidate]) -> list[str]:
        """The algorithms that one sample needs too much for, of those that the cost model does not rule out.

        Where none serves a sample at all, and where it is too large for cuDNN's numbers, these are all of them.
        """
        needs = {
            one[1]: self._measurement.workspace(one, Dim.BATCH, 1)
            for one in candidates
            if one[1] != STOCK
            and self._budget.allows(dims(self._problem)[-1])
            and self._least(one, Dim.BATCH, 1, 0.0, True) < math.inf
        }
        is_unserved = all(need is None for need in needs.values()) and not self._timed_so_far
        if is_unserved or is_too_large(self._problem.with_extent(1)):
            return list(needs)
        return [name for name, need in needs.items() if need is not None and need > self._allowed]

    def _following(self, candidate: Candidate, dim: Dim, tried: PartSizes, seen: Mapping[int, float]) -> int | None:
        """The size to time next, which fits: the largest, then what may take least."""
        left = [size for size in tried.sizes if size not in seen]
        bounds = {size: self._least(candidate, dim, size, tried.expected(size), not seen) for size in left}
        wanted = [size for size in left if bounds[size] < math.inf]
        if wanted and not seen and self._may_ask(dim):
            return tried.largest(wanted[-1])
        for size in sorted(wanted, key=lambda size: (bounds[size], -size)):
            if self._may_ask(dim) and tried.is_expected(size) and tried.fits(size):
                return size
        return None

    def _least(self, candidate: Candidate, dim: Dim, size: int, workspace: float, is_first: bool) -> float:
        """The least seconds that the whole may take in parts of a size; infinite if such parts are of no interest.

        Engines that are compiled at run time take so long to be planned that none is tried to learn more about it, and
        one of which nothing is known only if no other is faster than torch's own kernel.

        Args:
            workspace: bytes that such a part is expected to need.
        """
        provider, name = candidate
        is_compiled = isinstance(provider, Engines) and provider.is_compiled(self._problem, name)
        least = self._lower_bound(candidate, dim, size, is_first and not is_compiled)
        fastest = min((seconds for seconds, _ in self._timed_so_far), default=math.inf)
        if is_compiled and least == 0.0 and fastest < super()._bar(name) * self._stock_seconds:
            return math.inf
        if self._compares_workspaces and not is_first:
            beaten = any(seconds <= least and need <= workspace for seconds, need in self._timed_so_far)
            return math.inf if beaten else least
        return least

    def _noted(self, candidate: Candidate, dim: Dim, size: int, seen: dict[int, float]) -> Iterator[Option]:
        """The launch of a size, if that fits.

        Args:
            seen: {size: seconds of the whole in such parts}; this one is added, infinite where there is no launch.
        """
        seen[size] = math.inf
        need = self._measurement.workspace(candidate, dim, size)
        if need is None or need > self._allowed:
            return
        for option in self._timed(candidate, dim, size):
            seen[size] = option.seconds * extent(self._problem, dim) / size
            self._timed_so_far.append((seen[size], option.workspace))
            yield option

    def _may_ask(self, dim: Dim) -> bool:
        """Whether the workspaces of further parts along a dim may be asked for."""
        return (dim is Dim.BATCH and self._compares_workspaces) or self._budget.allows(dim)

    def _bar(self, algorithm: str) -> float:
        """As in any search; where workspaces are not compared, below the fastest launches so far, too."""
        bar = super()._bar(algorithm)
        if self._compares_workspaces:
            return bar
        return min([bar, *(seconds / self._stock_seconds for seconds, _ in self._timed_so_far)])
