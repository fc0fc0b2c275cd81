"""Affordable parts: those that may be tried where every question for a workspace makes a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mucudnn.convolution.problem import ConvProblem, Dim, Role
from mucudnn.convolution.tile import extent
from mucudnn.optimizer import PartSizes
from mucudnn.planning.offers import Offers, Task, sizes_of
from mucudnn.providers import STOCK, Provider
from mucudnn.providers.cudnn import proposals
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.form import is_too_large
from mucudnn.timing.measurement import Candidate, Measurement

MOST_FURTHER = 6
"""Sizes of an algorithm that are asked for below the largest one."""

MOST, MOST_OF_BATCHES = 32, 26
"""Once cuDNN was asked for so many plans, no workspace of another part is asked for: of all parts of a problem, and of
micro-batches. One part takes up to six plans: at different places, of a gradient of the weight two at each, as parts
add to what others have computed."""


class AffordableParts:
    """The sizes of parts of one problem that fit a limit, all of them asked for.

    First come the largest sizes of every algorithm, then, size by size, smaller ones of each, until the budget of plans
    is spent.

    Attributes:
        offered: who serves parts along which dim; torch's own kernel among them, of which no sizes are asked for here.
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
        self._budget = PlanBudget(measurement.problem, lambda: offers.plans_made)
        self.offered: dict[Task, Candidate] = {}
        self.fitting: dict[Task, dict[int, int]] = {}
        self._tried: dict[Task, PartSizes] = {}
        problem = measurement.problem
        batches = offers.along_batch(problem)
        wanted = {task: one for task, one in batches.items() if task[1] != STOCK and may_win(one)}
        self._budget.wait(wanted.values())
        self._ask(wanted)
        for further in (offers.along_space, offers.in_strips):
            served = {name for (_, name), fitting in self.fitting.items() if fitting}
            left = [name for _, name in wanted if name not in served and self._is_too_large(wanted[Dim.BATCH, name])]
            self._ask(offers.named(problem, further(measurement, allowed, left)))
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
        """Asks for smaller sizes of all in turn, but of engines that are compiled for every plan."""
        for _ in range(MOST_FURTHER):
            for task, fitting in self.fitting.items():
                smaller = [size for size in self._tried[task].sizes if size < min(fitting, default=0)]
                if not smaller or self._is_compiled(*self.offered[task]) or not self._budget.allows(task[0]):
                    continue
                need = self._tried[task].need(smaller[-1])
                if need <= self._allowed:
                    fitting[smaller[-1]] = int(need)

    def _is_compiled(self, provider: Provider, name: str) -> bool:
        return isinstance(provider, Engines) and provider.is_compiled(self._measurement.problem, name)

    def _sizes(self, dim: Dim, candidate: Candidate) -> PartSizes:
        # Not `self`: a cycle would hold the operands, memory of the card, until Python collects its garbage.
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
    """What is left of the whole beside as many parts of each size as it has room for, large ones first."""
    for size in sorted(sizes, reverse=True):
        whole %= size
    return whole


class PlanBudget:
    """The plans of one problem. Of those of micro-batches, enough are left to ask once of every engine.

    Where a user wants all engines tried, and not the best few, there are more plans, one part of each.
    """

    def __init__(self, problem: ConvProblem, plans_made: Callable[[], int]) -> None:
        """
        Args:
            plans_made: how many plans cuDNN was asked for so far, for whatever problem.
        """
        self._each = 2 if problem.target is Role.W and not problem.is_half else 1
        self._plans_made, self._before = plans_made, plans_made()
        self._waiting = set[str]()
        self._more = 0

    def wait(self, candidates: Iterable[Candidate]) -> None:
        """Tells the algorithms whose turn is to come. Those of cuDNN's older functions, and torch's, take no plans."""
        self._waiting = {name for provider, name in candidates if isinstance(provider, Engines)}
        self._more = self._each * max(0, len(self._waiting) - proposals.MOST)

    def begin(self, name: str) -> None:
        """Begins the turn of an algorithm."""
        self._waiting.discard(name)

    def allows(self, dim: Dim) -> bool:
        """Whether a further part along a dim may be asked for."""
        made = self._plans_made() - self._before + self._each * len(self._waiting)
        return made < self._more + (MOST_OF_BATCHES if dim is Dim.BATCH else MOST)
