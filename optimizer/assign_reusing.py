"""Assignment with workspaces: one candidate for every node, and one workspace that all nodes reuse in turn."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy.typing as npt

from mucudnn.optimizer.assign import assign, cost_of
from mucudnn.optimizer.assign_within import MOST_BRANCHES, TOLERANCE, DoesNotFit, Within, assign_within

Node = TypeVar("Node", bound=Hashable)

Ways = Sequence[tuple[float, float]]
"""A desirable set: (seconds, bytes of workspace) of the ways to compute one candidate."""


@dataclass(frozen=True)
class Reusing(Within[Node]):
    """A choice of candidates within a limit, and of ways to compute them.

    Attributes:
        ways: {node: index of the way in which its candidate is computed}.
        workspace: bytes of the one that all nodes reuse: the limit that each node's way keeps to.
    """

    ways: dict[Node, int]
    workspace: float


def assign_reusing(
    ways: Mapping[Node, Sequence[Ways]],
    moves: Mapping[tuple[Node, Node], npt.ArrayLike],
    bytes: Mapping[Node, Sequence[float]],
    limit: float,
    most_branches: int = MOST_BRANCHES,
    tolerance: float = TOLERANCE,
) -> Reusing[Node]:
    """A candidate and a way for every node, so that all bytes and the largest workspace add up to `limit` at most.

    Nodes that run one after the other reuse one workspace, so only the largest counts. For a workspace given, each
    candidate takes its fastest way within it, and `assign_within` chooses among the candidates in what memory is left.
    The workspaces that any way has are tried from the largest down. Without the limit of bytes a smaller workspace is
    never faster, so this ends where even then it would be no faster than what was found.

    Args:
        ways: for every node, the desirable set of each candidate; an empty one cannot be taken.
        moves, bytes, most_branches, tolerance: as for `assign_within`.
        limit: bytes of everything, `math.inf` for none.

    Raises:
        DoesNotFit: where no choice fits, with the least bytes that one takes, its workspace among them.
        ValueError: as `assign_within`.
    """
    sizes = sorted({size for each in ways.values() for found in each for _, size in found}, reverse=True)
    best: Reusing[Node] | None = None
    bound = least = math.inf
    for workspace in sizes:
        costs = {node: [_fastest(found, workspace) for found in each] for node, each in ways.items()}
        try:
            free = assign(costs, moves)
        except ValueError:
            if workspace == sizes[0]:
                raise
            break  # some node has no way in so little
        if best is not None and cost_of(costs, moves, free) >= (1 - tolerance) * best.seconds:
            bound = min(bound, cost_of(costs, moves, free))
            break
        try:
            within = assign_within(costs, moves, bytes, limit - workspace, most_branches, tolerance)
        except DoesNotFit as error:
            least = min(least, error.least + workspace)
            continue
        bound = min(bound, within.bound)
        if best is None or within.seconds < best.seconds:
            taken = {node: _index(ways[node][at], workspace) for node, at in within.chosen.items()}
            largest = max(ways[node][at][taken[node]][1] for node, at in within.chosen.items())
            best = Reusing(**vars(within), ways=taken, workspace=largest)
    if best is None:
        raise DoesNotFit(limit, least)
    return replace(best, bound=min(bound, best.seconds))


def _fastest(ways: Ways, workspace: float) -> float:
    return min((seconds for seconds, size in ways if size <= workspace), default=math.inf)


def _index(ways: Ways, workspace: float) -> int:
    """Of the fastest way; of equals, the one with the least workspace."""
    fitting = [at for at, (_, size) in enumerate(ways) if size <= workspace]
    return min(fitting, key=lambda at: ways[at])
