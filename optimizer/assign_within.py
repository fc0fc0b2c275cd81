"""Assignment within a total of bytes: one candidate for every node, so that the bytes of all nodes fit."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from mucudnn.optimizer.assign import MOST_ENTRIES, graph_of
from mucudnn.optimizer.elimination import Graph, least, width

Node = TypeVar("Node", bound=Hashable)
Numbers = npt.NDArray[np.float64]

MOST_BRANCHES = 20
"""Parts of the choices that are looked into before the best known is taken, with its gap, by default."""

TOLERANCE = 1e-3
"""A choice better by a smaller fraction is not searched for, by default: seconds are known less exactly."""

_ROUNDING = 1e-12  # Sums of floating-point seconds are no more exact.


class DoesNotFit(ValueError):
    """No choice fits the limit.

    Attributes:
        least: bytes of the choice that takes the fewest.
    """

    def __init__(self, limit: float, least: float) -> None:
        super().__init__(f"limit={limit:.0f}: no choice takes less than {least:.0f} bytes")
        self.least = least


@dataclass(frozen=True)
class Within(Generic[Node]):
    """A choice within a limit.

    Attributes:
        chosen: {node: index of its candidate}.
        seconds: what it takes.
        bytes: the sum of its nodes' bytes.
        bound: seconds; no choice that fits takes less.
    """

    chosen: dict[Node, int]
    seconds: float
    bytes: float
    bound: float

    @property
    def gap(self) -> float:
        """By what fraction of its time a better choice could be better: 0 for a proven optimum."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds > 0 else 0.0


def assign_within(
    costs: Mapping[Node, Sequence[float]],
    moves: Mapping[tuple[Node, Node], npt.ArrayLike],
    bytes: Mapping[Node, Sequence[float]],
    limit: float,
    most_branches: int = MOST_BRANCHES,
    tolerance: float = TOLERANCE,
) -> Within[Node]:
    """As `assign`, among the choices whose bytes add up to `limit` at most.

    To choose workspaces too, list as candidates of a node all pairs of a partition and a division of its desirable
    set. A price per byte turns the limit into costs, and `assign` finds the least sum exactly; the best price gives a
    bound that no choice beats (Lagrangian relaxation; Everett 1963). Where this leaves a gap, the choices are divided
    by the candidate of one node, and the part with the least bound is looked into next (branch and bound).

    Args:
        costs, moves: as for `assign`; costs and moves not negative.
        bytes: for every node, those of each candidate.
        limit: bytes.
        most_branches: how many parts are looked into. A number rather than a time, so that all ranks of a job that
            decide on the same numbers decide the same.
        tolerance: a choice better by at most this fraction is not searched for.

    Returns:
        The best choice found, with a bound: `gap` is 0 where it is proven to be an optimum.

    Raises:
        DoesNotFit: where no choice fits, with the least bytes that one takes.
        ValueError: as `assign`; also for bytes that do not fit `costs`, and for a graph that is not narrow.
    """
    nodes, graph = graph_of(costs, moves)
    sizes = [np.array(bytes[node], dtype=np.float64) for node in nodes]
    for node, size, cost in zip(nodes, sizes, graph.costs, strict=True):
        if size.shape != cost.shape or not (np.isfinite(size).all() and (size >= 0).all()):
            raise ValueError(f"bytes[{node!r}]: accepted is a number, 0 or more, for each of {len(cost)} candidates")
    if width(graph) > MOST_ENTRIES:
        raise ValueError("moves: within a limit of bytes, accepted is a narrow graph; this one is too wide")
    search = _Search(graph, sizes, limit, max(tolerance, _ROUNDING))
    best, bound = search.run(most_branches)
    return Within(dict(zip(nodes, best.chosen, strict=True)), best.seconds, best.bytes, min(bound, best.seconds))


class _Choice(NamedTuple):
    seconds: float
    bytes: float
    chosen: tuple[int, ...]


class _Part(NamedTuple):
    """The choices in which some nodes may take some of their candidates only.

    Attributes:
        bound: none of them takes less seconds.
        number: parts with equal bounds are taken in this order.
        forbidden: (node, candidates that it may not take).
        price: seconds per byte, at which the bound was found.
    """

    bound: float
    number: int
    forbidden: tuple[tuple[int, tuple[int, ...]], ...]
    price: float


class _Search:
    def __init__(self, graph: Graph, sizes: Sequence[Numbers], limit: float, tolerance: float) -> None:
        self.graph, self.sizes, self.limit, self.tolerance = graph, sizes, limit, tolerance
        self.best: _Choice | None = None

    def run(self, most_branches: int) -> tuple[_Choice, float]:
        """The best choice, and a bound on all."""
        lightest = self._priced(None, ())
        if lightest is None:
            raise ValueError("costs and moves: no choice of one candidate for each node is finite")
        if lightest.bytes > self.limit:
            raise DoesNotFit(self.limit, lightest.bytes)
        assert self.best is not None, "the lightest choice fits"
        numbers = itertools.count(1)
        parts = [_Part(0.0, 0, (), 0.0)]
        passed = math.inf  # the least bound of a part that was not looked into, as little in it is better
        branches = 0
        while parts:
            part = heapq.heappop(parts)
            if not self._is_worthwhile(part.bound):
                return self.best, min(part.bound, passed)
            found = self._relaxed(part)
            if found is None:
                continue
            bound, price, (node, taken) = found
            if not self._is_worthwhile(bound):
                passed = min(passed, bound)
                continue
            branches += 1
            if branches > most_branches:
                return self.best, min(bound, passed, *(other.bound for other in parts))
            every = range(len(self.graph.costs[node]))
            for banned in (tuple(index for index in every if index != taken), (taken,)):
                forbidden = (*part.forbidden, (node, banned))
                at = self._priced(price, forbidden)
                if at is not None:
                    value = max(bound, at.seconds + price * (at.bytes - self.limit))
                    heapq.heappush(parts, _Part(value, next(numbers), forbidden, price))
        return self.best, min(self.best.seconds, passed)

    def _is_worthwhile(self, bound: float) -> bool:
        assert self.best is not None
        return bound < self.best.seconds * (1 - self.tolerance)

    def _relaxed(self, part: _Part) -> tuple[float, float, tuple[int, int]] | None:
        """The bound of a part, the price that gives it, and the node and its candidate by which to divide the part.

        None where the part has been looked through: its best choice is known, or none fits.
        """
        heavy = self._priced(0.0, part.forbidden)
        if heavy is None or heavy.bytes <= self.limit:
            return None
        light = self._priced(part.price, part.forbidden) if part.price else None
        if light is None or light.bytes > self.limit:
            light = self._priced(None, part.forbidden)
            assert light is not None
            if light.bytes > self.limit:
                return None
        bound, price = max(part.bound, heavy.seconds), part.price
        while True:
            # The price at which the two are equally good; a third that is better there moves the bound up.
            between = (light.seconds - heavy.seconds) / (heavy.bytes - light.bytes)
            at = self._priced(between, part.forbidden)
            assert at is not None
            value = at.seconds + between * (at.bytes - self.limit)
            chord = heavy.seconds + between * (heavy.bytes - self.limit)
            if value > bound:
                bound, price = value, between
            if (
                value >= chord - abs(chord) * max(1e-9, self.tolerance / 10)
                or at in (heavy, light)
                or not self._is_worthwhile(bound)
            ):
                break
            heavy, light = (at, light) if at.bytes > self.limit else (heavy, at)
        # Where the two ends differ most in bytes, the relaxation mixes candidates: there it is divided.
        apart = [
            abs(float(size[a] - size[b])) if a != b else -1.0
            for size, a, b in zip(self.sizes, heavy.chosen, light.chosen, strict=True)
        ]
        node = max(range(len(apart)), key=lambda n: (apart[n], -n))
        return bound, price, (node, heavy.chosen[node])

    def _priced(self, price: float | None, forbidden: tuple[tuple[int, tuple[int, ...]], ...]) -> _Choice | None:
        """The best choice where a byte costs `price` seconds; of None, the one with the fewest bytes."""
        banned: dict[int, set[int]] = {}
        for node, indices in forbidden:
            banned.setdefault(node, set()).update(indices)
        costs = []
        for node, (cost, size) in enumerate(zip(self.graph.costs, self.sizes, strict=True)):
            priced = np.where(np.isfinite(cost), size, np.inf) if price is None else cost + price * size
            if node in banned:
                priced = priced.copy()
                priced[sorted(banned[node])] = np.inf
            costs.append(priced)
        moves = self.graph.moves
        if price is None:
            moves = {pair: np.where(np.isfinite(table), 0.0, np.inf) for pair, table in moves.items()}
        found = least(Graph(costs, moves))
        if found is None:
            return None
        choice = _Choice(
            self._seconds(found), math.fsum(s[i] for s, i in zip(self.sizes, found, strict=True)), (*found,)
        )
        if choice.bytes <= self.limit and (self.best is None or choice.seconds < self.best.seconds):
            self.best = choice
        return choice

    def _seconds(self, chosen: Sequence[int]) -> float:
        nodes = (float(cost[index]) for cost, index in zip(self.graph.costs, chosen, strict=True))
        edges = (float(table[chosen[a], chosen[b]]) for (a, b), table in self.graph.moves.items())
        return math.fsum((*nodes, *edges))
