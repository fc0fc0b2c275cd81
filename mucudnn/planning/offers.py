"""Decides which algorithms are tried along which dims of a problem, and in parts of which sizes.

`fitting_sizes` asks for the workspace of every size; `AffordableParts` of few, where each takes a plan of cuDNN.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from mucudnn.convolution.problem import ConvProblem, Dim, Role
from mucudnn.convolution.tile import divided_dims, extent
from mucudnn.optimizer import PartSizes, micro_batch_sizes
from mucudnn.providers import STOCK, Provider
from mucudnn.providers.cudnn.allowed import MOST_PROPOSALS
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.form import is_too_large
from mucudnn.providers.strips import strips_of
from mucudnn.timing.measurement import Candidate, Measurement, middle

Task = tuple[Dim, str]
"""A dim and an algorithm that is tried along it."""

WIDTHS = 3
"""The number of widths that are tried for an algorithm that only serves in strips within the limit."""


class Offers:
    """The algorithms of some providers.

    On a processor they are named for parts along each dim, and the workspaces of these decide at once along which dims,
    and in which strips, each is tried (`within`). On a GPU each workspace takes a plan. So there an algorithm is
    named for the whole and tried along the mini-batch, then, if one sample is too large for it, along space, and if the
    smallest tile is, too, in strips (`in_strips`): see `AffordableParts`.

    Attributes:
        are_plans_costly: whether providers must make a plan to know the workspace of a part, as on a GPU.
    """

    def __init__(self, providers: Sequence[Provider], are_plans_costly: bool) -> None:
        self._providers, self.are_plans_costly = providers, are_plans_costly

    def candidates(self, problem: ConvProblem, dim: Dim) -> list[Candidate]:
        """The candidates for parts of the problem along a dim; where plans are costly, some may not serve them."""
        is_whole = dim is Dim.BATCH or self.are_plans_costly
        part = problem if is_whole else middle(problem, dim, extent(problem, dim) // 2).problem
        return [(provider, name) for provider in self._providers for name in provider.algorithms(part)]

    def providers(self, problem: ConvProblem) -> dict[str, Provider]:
        """The providers that serve the problem or parts of it, by algorithm."""
        found: dict[str, Provider] = {}
        for dim in divided_dims(problem):
            found |= {algorithm: provider for provider, algorithm in self.candidates(problem, dim)}
            for candidate in self.candidates(problem, dim):
                found |= {strips.name: strips for strips in strips_of(problem, dim, *candidate)}
        return found

    def within(self, measurement: Measurement, allowed: float) -> dict[Task, Candidate]:
        """The candidates for parts of a problem along each dim, within so many bytes or not.

        An algorithm of which the smallest part along any one dim needs more is offered on strips along a second dim: on
        the widest that fit beneath the smallest part along the first, on half of these, and on a quarter.
        """
        problem = measurement.problem
        found = {(dim, one[1]): one for dim in divided_dims(problem) for one in self.candidates(problem, dim)}
        least: dict[str, float] = {}
        for (dim, name), one in found.items():
            need = measurement.workspace(one, dim, 1)
            least[name] = min(least.get(name, math.inf), math.inf if need is None else need)
        for (dim, name), one in [*found.items()]:
            if name != STOCK and allowed < least[name] < math.inf:
                every = ((strips, strips.name) for strips in strips_of(problem, dim, *one))
                fit = (strips for strips in every if workspace_of_sizes(measurement, strips, dim, allowed, [1]))
                found |= {(dim, strips[1]): strips for strips in itertools.islice(fit, WIDTHS)}
        return found

    def in_strips(self, measurement: Measurement, allowed: float, names: Sequence[str]) -> list[Task]:
        """Which algorithms are tried on strips of samples that are too large for them, or of tiles, where there is one
        sample or where it is too large for cuDNN's numbers.

        The widest strips are chosen that would fit within so many bytes if these were in proportion to the width.
        """
        problem = measurement.problem
        is_by_sample = problem.extent > 1 and not is_too_large(problem.with_extent(1))
        dim = Dim.BATCH if is_by_sample else divided_dims(problem)[-1]
        found: list[Task] = []
        for one in self.candidates(problem, Dim.BATCH):
            need = measurement.workspace(one, dim, 1) if one[1] in names else None
            if need is not None:
                every = strips_of(problem, dim, *one)
                widths = (strips for strips in every if need * strips.size <= allowed * extent(problem, strips.dim))
                found += [(dim, strips.name) for strips in itertools.islice(widths, 1)]
        return found

    @property
    def plans_made(self) -> int:
        """How many plans cuDNN was asked for so far."""
        return sum(provider.plans_made for provider in self._providers if isinstance(provider, Engines))


def sizes_of(problem: ConvProblem, candidate: Candidate, dim: Dim, policy: str) -> set[int]:
    """The sizes that a policy tries; the whole is left out where another trial computes it in the same way."""
    whole = extent(problem, dim)
    sizes = set(micro_batch_sizes(policy, whole))
    return sizes - {whole} if candidate[1] == STOCK or dim is not Dim.BATCH else sizes


def workspace_of_sizes(
    measurement: Measurement, candidate: Candidate, dim: Dim, allowed: float, sizes: Iterable[int]
) -> dict[int, int]:
    """{size: bytes of workspace}, for those of the sizes whose parts the candidate serves within a limit."""
    needs = {size: measurement.workspace(candidate, dim, size) for size in sizes}
    return {size: need for size, need in needs.items() if need is not None and need <= allowed}


def fitting_sizes(
    measurement: Measurement, candidate: Candidate, dim: Dim, allowed: float, policy: str
) -> dict[int, int]:
    """The sizes that a policy tries, as `workspace_of_sizes`.

    Tiles overlap, so the best use of a limit is as few tiles as possible, of equal size: this size is tried, too.
    """
    problem = measurement.problem
    found = workspace_of_sizes(measurement, candidate, dim, allowed, sizes_of(problem, candidate, dim, policy))
    if dim is not Dim.BATCH and found:
        whole = extent(problem, dim)

        def is_too_large(size: int) -> bool:
            return not workspace_of_sizes(measurement, candidate, dim, allowed, [size])

        largest = bisect_left(range(whole), True, lo=max(found) + 1, key=is_too_large) - 1
        even = -(-whole // -(-whole // largest))
        found |= workspace_of_sizes(measurement, candidate, dim, allowed, [even])
    return found


MOST_FURTHER = 6
"""Sizes of an algorithm that are asked for below the largest one."""

MOST, MOST_OF_BATCHES = 32, 26
"""Once cuDNN was asked for so many plans, no workspace of another part is asked for: of all parts of a problem, and of
micro-batches. One part takes up to six plans: at different places, of a gradient of the weight two at each, as parts
add to what others have computed."""


class AffordableParts:
    """The sizes of parts of one problem that fit a limit, where to know the workspace of a size takes a plan.

    The largest size of every algorithm is asked for first, then smaller ones of each in turn, until the budget of plans
    is spent.

    Attributes:
        offered: the candidates along each dim; no sizes are asked for of torch's own kernel, which is among them.
        fitting: {size: bytes} of the others.
    """

    def __init__(
        self,
        offers: Offers,
        measurement: Measurement,
        allowed: float,
        policy: str,
        may_win: Callable[[Candidate], bool],
    ) -> None:
        """
        Args:
            allowed: bytes of workspace.
            policy: which sizes are tried.
            may_win: whether an algorithm is of interest; otherwise nothing is asked of it.
        """
        self._measurement, self._allowed, self._policy = measurement, allowed, policy
        self.offered: dict[Task, Candidate] = {}
        self.fitting: dict[Task, dict[int, int]] = {}
        self._tried: dict[Task, PartSizes] = {}
        problem = measurement.problem
        batches: dict[Task, Candidate] = {(Dim.BATCH, one[1]): one for one in offers.candidates(problem, Dim.BATCH)}
        wanted = {task: one for task, one in batches.items() if task[1] != STOCK and may_win(one)}
        self._budget = PlanBudget(problem, lambda: offers.plans_made, wanted.values())
        self._ask(wanted)
        providers = offers.providers(problem)
        for is_in_strips in (False, True):
            served = {name for (_, name), fitting in self.fitting.items() if fitting}
            left = [name for _, name in wanted if name not in served and self._is_too_large(wanted[Dim.BATCH, name])]
            tiles = [(dim, name) for dim in divided_dims(problem)[1:] for name in left]
            tasks = offers.in_strips(measurement, allowed, left) if is_in_strips else tiles
            self._ask({task: (providers[task[1]], task[1]) for task in tasks if task[1] in providers})
        self._ask_further()
        for task, fitting in self.fitting.items():
            if fitting and _left_by(fitting, extent(problem, task[0])):
                fitting |= self._tried[task].fitting  # small ones that were asked for on the way compute the rest
        stock = [one for (_, name), one in batches.items() if name == STOCK]
        self.offered |= {(dim, STOCK): one for dim in {dim for dim, _ in self.offered} | {Dim.BATCH} for one in stock}

    def _ask(self, candidates: dict[Task, Candidate]) -> None:
        """Asks for the largest sizes of candidates."""
        for task, candidate in candidates.items():
            self._budget.begin(task[1])
            self._tried[task] = sizes = self._sizes(task[0], candidate)
            largest = sizes.largest()
            self.offered[task] = candidate
            self.fitting[task] = {} if largest is None else {largest: int(sizes.need(largest))}

    def _ask_further(self) -> None:
        """Asks for smaller sizes of all candidates in turn, except engines that are compiled for every plan."""
        for _ in range(MOST_FURTHER):
            for task, fitting in self.fitting.items():
                provider, name = self.offered[task]
                if isinstance(provider, Engines) and provider.is_compiled(self._measurement.problem, name):
                    continue
                smaller = [size for size in self._tried[task].sizes if size < min(fitting, default=0)]
                if not smaller or not self._budget.allows(task[0]):
                    continue
                need = self._tried[task].need(smaller[-1])
                if need <= self._allowed:
                    fitting[smaller[-1]] = int(need)

    def _sizes(self, dim: Dim, candidate: Candidate) -> PartSizes:
        # Not `self`: a cycle would keep the operands, memory of the card, until Python collects its garbage.
        measurement, budget = self._measurement, self._budget

        def ask(size: int) -> int | None:
            return measurement.workspace(candidate, dim, size) if budget.allows(dim) else None

        return PartSizes(sorted(sizes_of(measurement.problem, candidate, dim, self._policy)), self._allowed, ask)

    def _is_too_large(self, candidate: Candidate) -> bool:
        """Whether one sample is served, but needs more than the limit, or is too large for cuDNN's numbers."""
        if not self._budget.allows(Dim.HEIGHT):
            return False
        if is_too_large(self._measurement.problem.with_extent(1)):
            return True
        need = self._measurement.workspace(candidate, Dim.BATCH, 1)
        return need is not None and need > self._allowed


def _left_by(sizes: Iterable[int], whole: int) -> int:
    """The remainder of the whole after as many parts of each size as fit, large ones first."""
    for size in sorted(sizes, reverse=True):
        whole %= size
    return whole


class PlanBudget:
    """Limits the plans that cuDNN is asked for. A part along another dim is refused before every engine has had one
    for micro-batches.

    Where a user wants all engines tried, and not the best few, there are more plans, for one part of each.
    """

    def __init__(self, problem: ConvProblem, plans_made: Callable[[], int], candidates: Iterable[Candidate]) -> None:
        """
        Args:
            plans_made: how many plans cuDNN was asked for so far, for whatever problem.
            candidates: that are still to be tried. Algorithms of cuDNN's older functions, and torch's, take no plans.
        """
        self._each = 2 if problem.target is Role.W and not problem.is_half else 1
        self._plans_made, self._before = plans_made, plans_made()
        self._waiting = {name for provider, name in candidates if isinstance(provider, Engines)}
        self._more = self._each * max(0, len(self._waiting) - MOST_PROPOSALS)

    def begin(self, name: str) -> None:
        """Begins the turn of an algorithm."""
        self._waiting.discard(name)

    def allows(self, dim: Dim) -> bool:
        """Whether a further part along a dim may be asked for."""
        made = self._plans_made() - self._before + self._each * len(self._waiting)
        return made < self._more + (MOST_OF_BATCHES if dim is Dim.BATCH else MOST)
