"""Plan budget: how many plans cuDNN may be asked for while one problem is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mucudnn.convolution.problem import ConvProblem, Dim, Role
from mucudnn.providers.cudnn import proposals
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.timing.measurement import Candidate

MOST, MOST_OF_BATCHES = 32, 26
"""Once cuDNN was asked for so many plans, no workspace of another part is asked for: of all parts of a problem, and of
micro-batches. One part takes up to six plans: at different places, of a gradient of the weight two at each, as parts
add to what others have computed."""


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
