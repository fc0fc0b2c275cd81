"""Assignment: one candidate for every node of a graph so that the costs of nodes and edges add up to the least.

Within a total of bytes, the bytes of all nodes fit it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from mucudnn.optimizer.elimination import Graph, least, width

Node = TypeVar("Node", bound=Hashable)
Numbers = npt.NDArray[np.float64]

MOST_ENTRIES = 2**27  # Entries of the largest table that is worked through; a graph that needs a larger one is refused.

MOST_BRANCHES = 20
"""Parts of the choices that are looked into before the best known is taken, with its gap. A number rather than a time:
all ranks of a job that decide on the same numbers decide the same."""

TOLERANCE = 1e-3  # A choice better by a smaller fraction is not searched for: seconds are known less exactly.


class DoesNotFit(ValueError):
    """No choice fits the limit.

    Attributes:
        least: bytes of the choice that takes the fewest.
    """

    def __init__(self, limit: float, least: float) -> None:
        super().__init__(f"limit={limit:.0f}: no choice takes less than {least:.0f} bytes")
        self.least = least


@dataclass(frozen=True)
class CandidateChoice(Generic[Node]):
    """A choice of a candidate for every node.

    Attributes:
        chosen: {node: index of its candidate}.
        seconds: what it takes.
        bound: seconds; no choice that fits takes less.
    """

    chosen: dict[Node, int]
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """The share of its time that a better choice could save at most: 0 for a proven optimum."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds > 0 else 0.0


def assign(
    costs: Mapping[Node, Sequence[float]],
    moves: Mapping[tuple[Node, Node], npt.ArrayLike],
    bytes: Mapping[Node, Sequence[float]] | None = None,
    limit: float = math.inf,
) -> CandidateChoice[Node]:
    """The candidate of every node whose costs, with those of the moves between neighbours, add up to the least.

    Without a limit this is exact. Nodes are eliminated one by one: of a node and its neighbours, the best candidate of
    the node is found for all combinations of theirs, which makes one table among the neighbours (non-serial dynamic
    programming, Bertelè and Brioschi 1972). On a chain of layers this is the shortest path of Dryden et al. (IPDPS
    2019). Residual networks and U-Nets need tables of two neighbours. The result depends on the numbers and on the
    order of `costs` only; of candidates that are equally good, the first of the node that is eliminated first counts.

    A price per byte turns a limit of bytes into costs; the best price gives a bound that no choice beats (Lagrangian
    relaxation; Everett 1963). Where this leaves a gap, the choices are divided by the candidate of one node, and the
    part with the least bound is looked into next (branch and bound).

    Args:
        costs: for every node, the seconds of each candidate, not negative; `math.inf` for one that cannot be taken.
        moves: for pairs of nodes, a matrix: the seconds between a candidate of the first (row) and one of the second
            (column). A pair may occur in both orders, and a node with itself, whose diagonal then counts.
        bytes: for every node, those of each candidate; none if not given.
        limit: bytes of all nodes together.

    Returns:
        The best choice found, with a bound: `gap` is 0 where it is proven to be an optimum.

    Raises:
        DoesNotFit: where no choice fits, with the least bytes that one takes.
        ValueError: one line, for a node without candidates, for a matrix or bytes that do not fit the nodes, for a
            number that is not one, where no choice is finite, and for a graph that needs a table of more than
            `MOST_ENTRIES`.
    """
    nodes, graph = graph_of(costs, moves)
    given = {node: [0.0] * len(costs[node]) for node in nodes} if bytes is None else bytes
    sizes = [np.array(given[node], dtype=np.float64) for node in nodes]
    for node, size, cost in zip(nodes, sizes, graph.costs, strict=True):
        if size.shape != cost.shape or not (np.isfinite(size).all() and (size >= 0).all()):
            raise ValueError(f"bytes[{node!r}]: accepted is a number, 0 or more, for each of {len(cost)} candidates")
    if (entries := width(graph)) > MOST_ENTRIES:
        raise ValueError(
            "costs and moves: too many nodes have moves between one another: this takes a table of"
            f" {entries:.0e} numbers; accepted: {MOST_ENTRIES:.0e}, with fewer moves or candidates"
        )
    best, bound = _Search(graph, sizes, limit).run()
    return CandidateChoice(dict(zip(nodes, best.chosen, strict=True)), best.seconds, min(bound, best.seconds))


def graph_of(
    costs: Mapping[Node, Sequence[float]], moves: Mapping[tuple[Node, Node], npt.ArrayLike]
) -> tuple[list[Node], Graph]:
    """The nodes in order, and the checked numbers with nodes as positions in that order."""
    nodes = list(costs)
    at = {node: index for index, node in enumerate(nodes)}
    unary = [np.array(costs[node], dtype=np.float64) for node in nodes]
    for node, cost in zip(nodes, unary, strict=True):
        if cost.ndim != 1 or not len(cost):
            raise ValueError(f"costs[{node!r}]: shape {cost.shape}; accepted: one number for each of its candidates")
        if np.isnan(cost).any() or (cost == -np.inf).any():
            raise ValueError(f"costs[{node!r}]: accepted are seconds and infinity, not NaN")
    tables: dict[tuple[int, int], Numbers] = {}
    for (a, b), matrix in moves.items():
        if a not in at or b not in at:
            raise ValueError(f"moves[{a!r}, {b!r}]: costs has no node {(b if a in at else a)!r}")
        table = np.array(matrix, dtype=np.float64)
        i, j = at[a], at[b]
        if table.shape != (len(unary[i]), len(unary[j])):
            raise ValueError(
                f"moves[{a!r}, {b!r}]: shape {table.shape}; accepted: {(len(unary[i]), len(unary[j]))}, the candidates"
                " of both"
            )
        if np.isnan(table).any() or (table == -np.inf).any():
            raise ValueError(f"moves[{a!r}, {b!r}]: accepted are seconds and infinity, not NaN")
        if i == j:
            unary[i] = unary[i] + np.diagonal(table)
            continue
        pair, table = ((i, j), table) if i < j else ((j, i), table.T)
        tables[pair] = tables[pair] + table if pair in tables else table
    return nodes, Graph(unary, tables)


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
    def __init__(self, graph: Graph, sizes: Sequence[Numbers], limit: float) -> None:
        self.graph, self.sizes, self.limit = graph, sizes, limit
        self.best: _Choice | None = None

    def run(self) -> tuple[_Choice, float]:
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
            if branches > MOST_BRANCHES:
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
        return bound < self.best.seconds * (1 - TOLERANCE)

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
                value >= chord - abs(chord) * max(1e-9, TOLERANCE / 10)
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
