"""What the convolutions of a session that are planned live have in common: explorations, and what is on record."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch

from mucudnn.convolution.call import Call
from mucudnn.devices import device_of
from mucudnn.devices.host import HostStopwatch
from mucudnn.optimizer import Key
from mucudnn.planning.experience import Experience
from mucudnn.planning.outline import may_exceed
from mucudnn.planning.planner import Planner
from mucudnn.process import Recent
from mucudnn.runtime.explored import Explored, LiveBudget
from mucudnn.settings import Settings
from mucudnn.timing.logbook import Environment

MOST_SHAPES = 4096
"""The most problems that are explored at once, and the most convolutions that are known to have been called once."""


class LivePlanning:
    """Makes the explorations of convolutions, within one limit or several.

    Attributes:
        budget: of all explorations.
        planner_for: finds the planner of a call; `None` where it is left to torch.
        called_once: the hashes of the keys of convolutions that torch has computed once before they are decided. The
            keys themselves, tuples of tuples, would make every garbage collection longer.
    """

    def __init__(
        self, settings: Settings, experience: Experience, planner_for: Callable[[Call], Planner | None]
    ) -> None:
        """``experience``: what earlier runs found."""
        self._is_chosen, self._limit = settings.planning == "live", settings.workspace_limit
        self.planner_for = planner_for
        self.budget, self._shapes = LiveBudget(), experience.shapes
        self._explored: Recent[Hashable, Explored] = Recent(MOST_SHAPES)
        self._launches: Recent[Hashable, dict[Key, list[float]]] = Recent(MOST_SHAPES)
        self.called_once: Recent[int, None] = Recent(MOST_SHAPES)

    def serves(self, device_type: str) -> bool:
        """Whether convolutions on such devices may be explored: on processors always, else if the user asks for it."""
        return self._is_chosen or device_type == "cpu"

    def reaches(self, device: torch.device) -> bool:
        """Whether the convolutions of a device are explored on their calls; otherwise they are measured ahead.

        Unless live planning is asked for, deterministic algorithms are measured ahead: the first run of a program is
        then to compute what all others compute.
        """
        return self.serves(device.type) and (self._is_chosen or not device_of(device).is_deterministic)

    def awaits(self, key: tuple[Any, ...], device: torch.device) -> bool:
        """Whether a convolution is decided only at its next call, so that torch computes this one.

        This is so for a first call that the database knows nothing about: a program may have new shapes at every step,
        and shapes that do not recur must cost next to nothing. What torch's own kernel may not compute within the limit
        is decided at once.
        """
        name = hash(key)
        if self._shapes or name in self.called_once or device_of(device).is_deterministic:
            return False
        if is_within := not may_exceed(key[1], self._limit):
            self.called_once[name] = None
        return is_within

    def expects(self, call: Call) -> bool:
        """Whether the database may have something about a call's convolutions, so that the first call should look."""
        shapes = str(call.direction), tuple(call.input.shape), tuple(call.weight.shape)
        return shapes in self._shapes or device_of(call.input.device).is_deterministic

    def avoids_stock(self, call: Call, limit: float) -> bool:
        """Whether torch's own kernel is known to exceed a limit, so that not even the first call may be its own."""
        if limit == math.inf or (problem := call.problem()) is None or (planner := self.planner_for(call)) is None:
            return False
        return planner.exceeds(problem, limit)

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
        watch = HostStopwatch()
        with self.budget.lock:
            if (same, limit) not in self._explored:
                if same not in self._launches:
                    self._launches[same] = {}
                search = planner.search(planner.measurement(problem, None, result.stride()), limit)
                self._explored[same, limit] = Explored(self.budget, search, self._launches[same])
                self.budget.spent(watch)
            return self._explored[same, limit]
