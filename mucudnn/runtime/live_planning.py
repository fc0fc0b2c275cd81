"""Live planning: what all convolutions of a session share that are explored by their own calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch

from mucudnn.convolution.call import Call
from mucudnn.devices import device_of
from mucudnn.optimizer import Key
from mucudnn.planning.experience import Experience
from mucudnn.planning.planner import Planner
from mucudnn.providers import STOCK
from mucudnn.recent import Recent
from mucudnn.runtime.explored import Explored, LiveBudget
from mucudnn.runtime.pooled_launches import PooledLaunches
from mucudnn.settings import Settings
from mucudnn.timing.board import Board
from mucudnn.timing.environment import Environment

MOST_SHAPES = 4096
"""The most problems that are explored at once, and the most convolutions that are known to have been called once."""


class LivePlanning:
    """Makes the explorations of convolutions, within one limit or several.

    Attributes:
        budget: of all of them.
        planner_for: who plans a call; `None` where it is left to torch.
    """

    def __init__(
        self,
        settings: Settings,
        experience: Experience,
        planner_for: Callable[[Call], Planner | None],
        board: Board | None = None,
    ) -> None:
        """
        Args:
            experience: what earlier runs found.
            planner_for: as above.
            board: of processes that run the same program, among which trials are shared out.
        """
        self._is_chosen, self._board = settings.planning == "live", board
        self.planner_for = planner_for
        self.budget, self._shapes = LiveBudget(), experience.shapes
        self._explored: Recent[Hashable, Explored] = Recent(MOST_SHAPES)
        self._launches: Recent[Hashable, dict[Key, list[float]]] = Recent(MOST_SHAPES)
        # By the hashes of their keys: so many tuples of tuples would make every garbage collection longer.
        self._called_once: Recent[int, None] = Recent(MOST_SHAPES)

    def serves(self, device_type: str) -> bool:
        """Whether convolutions on such devices may be explored: on processors, and elsewhere if the user asks for
        it."""
        return self._is_chosen or device_type == "cpu"

    def reaches(self, device: torch.device) -> bool:
        """Whether the convolutions of a device are explored on their calls; otherwise they are measured ahead.

        Unless live planning is asked for, deterministic algorithms are measured ahead: the first run of a program is
        then to compute what all others compute.
        """
        return self._is_chosen or (self.serves(device.type) and not device_of(device).is_deterministic)

    def awaits(self, key: Hashable, device: torch.device) -> bool:
        """Whether a convolution is decided only at its next call, so that torch computes this one.

        This holds for a first call that the database knows nothing about: a program may have new shapes at every step,
        and shapes that do not recur must cost next to nothing.
        """
        name = hash(key)
        if self._shapes or name in self._called_once or device_of(device).is_deterministic:
            return False
        self._called_once[name] = None
        return True

    def met(self, keys: Iterable[Hashable]) -> set[int]:
        """The convolutions, as the hashes of these keys and of those that were called once."""
        return self._called_once.keys() | set(map(hash, keys))

    def expects(self, call: Call) -> bool:
        """Whether something may be on record of a call's convolutions, so that the first call should look there."""
        shapes = str(call.direction), tuple(call.input.shape), tuple(call.weight.shape)
        return shapes in self._shapes or device_of(call.input.device).is_deterministic

    def calls_before(self, key: Hashable) -> int:
        """The number of calls, none or one, that torch has computed before a convolution is decided."""
        return int(hash(key) in self._called_once)

    def explored(self, call: Call, result: torch.Tensor, limit: float) -> Explored | None:
        """The exploration of a call's problem within a limit, which several layers may share; `None` if torch keeps it.

        Args:
            result: of torch's own kernel.
            limit: bytes of workspace.
        """
        problem = call.problem(result)
        planner = None if problem is None else self.planner_for(call)
        if problem is None or planner is None:
            return None
        same = problem, result.stride(), planner.device, Environment.current(planner.device)
        with self.budget.lock:
            if (same, limit) not in self._explored:
                if same not in self._launches:
                    self._launches[same] = {}
                search = planner.search(planner.measurement(problem, None, result.stride()), limit)
                pool = None
                if self._board is not None:
                    terms = {"live": True, "strides": list(result.stride()), "extent": problem.extent, **search.terms}
                    pool = PooledLaunches(self._board, {**search.measurement.logbook.key(problem), **terms}, STOCK)
                explored = Explored(self.budget, search, result.stride(), self._launches[same], pool)
                self._explored[same, limit] = explored
            return self._explored[same, limit]
