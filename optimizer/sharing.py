"""Workspace division (WD): finds the fastest divisions of many convolutions whose workspaces together fit a total."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np

from mucudnn.optimizer import knapsack
from mucudnn.optimizer.pareto import Costed, Item, desirable_set

TIME_LIMIT = 60.0  # Seconds after which the best sharing known is taken, with its gap, by default.


@dataclass(frozen=True)
class Sharing(Generic[Item]):
    """A division for each kernel.

    Attributes:
        divisions: in the order of the kernels.
        bound: seconds; no other sharing takes less.
    """

    divisions: list[Item]
    bound: float

    @property
    def seconds(self) -> float:
        """The sum of the kernels' times."""
        return _seconds(self.divisions)

    @property
    def workspace(self) -> int:
        """Bytes: the sum of the kernels' workspaces."""
        return sum(division.workspace for division in self.divisions)

    @property
    def gap(self) -> float:
        """By what fraction of its time a better sharing could be better: 0 for a proven optimum."""
        return 0.0 if self.seconds <= self.bound else 1 - self.bound / self.seconds


def share(kernels: Sequence[Sequence[Item]], total: float, time_limit: float = TIME_LIMIT) -> Sharing[Item]:
    """The fastest choice of one division for each kernel whose workspaces add up to `total` at most.

    Minimises the sum of T_kc x_kc over the kernels k and their divisions c, subject to one c per k and the sum of
    M_kc x_kc within the total (WD, mu-cuDNN, Oyama et al. 2018, section III-C).

    Args:
        kernels: for each, divisions to choose from; those that another dominates are never chosen.
        total: bytes that all workspaces may take together; `math.inf` for no limit.
        time_limit: seconds after which the best sharing known is taken, with its gap; an optimum is proven in
            milliseconds on all but contrived inputs.

    Raises:
        ValueError: for a kernel without divisions, and for a total that no choice fits, naming the smallest that does.
    """
    menus = [desirable_set(kernel) for kernel in kernels]
    for number, menu in enumerate(menus):
        if not menu:
            raise ValueError(f"kernels[{number}] has no divisions: it takes at least one")
    smallest = sum(menu[0].workspace for menu in menus)
    if total < smallest:
        raise ValueError(f"total={total}: these {len(menus)} kernels fit no total below {smallest} bytes")
    room = int(min(total, sum(menu[-1].workspace for menu in menus)))
    groups = [
        knapsack.Group(
            np.array([division.workspace for division in menu], dtype=np.int64),
            np.array([division.seconds for division in menu]),
        )
        for menu in menus
    ]
    if not groups:
        return Sharing([], 0.0)
    solution = knapsack.solve(groups, room, time_limit)
    divisions = [menu[item] for menu, item in zip(menus, solution.items, strict=True)]
    return Sharing(divisions, _seconds(divisions) if solution.proven else solution.bound)


def _seconds(divisions: Sequence[Costed]) -> float:
    return math.fsum(division.seconds for division in divisions)
