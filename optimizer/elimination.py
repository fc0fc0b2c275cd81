"""Minimises a sum of costs of nodes and of pairs of nodes over a graph by eliminating one node after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


class Graph(NamedTuple):
    """Numbered nodes with candidates.

    Attributes:
        costs: for each node, the cost of each candidate.
        moves: for pairs of nodes in ascending order, a matrix: what the candidates of both cost together.
    """

    costs: Sequence[Numbers]
    moves: Mapping[tuple[int, int], Numbers]


class _Step(NamedTuple):
    """A node that is eliminated, and the neighbours that it then has, ascending."""

    node: int
    scope: tuple[int, ...]


class _Table(NamedTuple):
    scope: tuple[int, ...]
    values: Numbers


def order(graph: Graph) -> list[_Step]:
    """The nodes in the order of their elimination: always the one whose table is the smallest, the first of equals."""
    sizes = [len(cost) for cost in graph.costs]
    beside: dict[int, set[int]] = {node: set() for node in range(len(sizes))}
    for a, b in graph.moves:
        beside[a].add(b)
        beside[b].add(a)
    steps = []
    while beside:
        node = min(beside, key=lambda n: (math.prod(sizes[m] for m in beside[n]) * sizes[n], n))
        scope = beside.pop(node)
        steps.append(_Step(node, tuple(sorted(scope))))
        for other in scope:
            beside[other] = (beside[other] | scope) - {node, other}
    return steps


def width(graph: Graph) -> int:
    """Entries of the largest table that :func:`least` works through."""
    sizes = [len(cost) for cost in graph.costs]
    return max((math.prod(sizes[n] for n in step.scope) * sizes[step.node] for step in order(graph)), default=0)


def least(graph: Graph) -> list[int] | None:
    """The candidate of each node with the least sum; None where no choice is finite.

    Of equals, an eliminated node takes its first candidate.
    """
    tables = [_Table((node,), cost) for node, cost in enumerate(graph.costs)]
    tables += [_Table(pair, table) for pair, table in graph.moves.items()]
    eliminated: list[tuple[_Step, list[Numbers]]] = []
    for step in order(graph):
        axes = (step.node, *step.scope)
        mine = [_spread(table, axes) for table in tables if step.node in table.scope]
        tables = [table for table in tables if step.node not in table.scope]
        values = _minimum(mine, tuple(len(graph.costs[node]) for node in axes))
        if not np.isfinite(values).any():
            return None
        eliminated.append((step, mine))
        if step.scope:
            tables.append(_Table(step.scope, values))
    chosen = [0] * len(graph.costs)
    for step, mine in reversed(eliminated):
        at = [chosen[node] for node in step.scope]
        rows = [_column(table, at) for table in mine]
        chosen[step.node] = int(np.argmin(sum(rows[1:], start=rows[0])))
    return chosen


def _column(table: Numbers, at: Sequence[int]) -> Numbers:
    """A table's numbers for each candidate of its first dim, given the candidates of the other nodes."""
    index: tuple[Any, ...] = tuple(i if n > 1 else 0 for i, n in zip(at, table.shape[1:], strict=True))
    return table[(slice(None), *index)]


def _minimum(tables: Sequence[Numbers], shape: tuple[int, ...]) -> Numbers:
    """The least sum of the tables over their first dim: candidate by candidate, which stays in a processor's cache."""
    result = np.full(shape[1:], np.inf)
    part = np.empty(shape[1:])
    for candidate in range(shape[0]):
        # A candidate that is forbidden has no finite sum.
        if any(table.size == len(table) and table[candidate].flat[0] == np.inf for table in tables):
            continue
        part[...] = tables[0][candidate]
        for table in tables[1:]:
            np.add(part, table[candidate], out=part)
        np.minimum(result, part, out=result)
    return result


def _spread(table: _Table, axes: Sequence[int]) -> Numbers:
    """The values with one dim for each of `axes`, those that they do not depend on being of extent 1."""
    present = [node for node in axes if node in table.scope]
    values = np.ascontiguousarray(table.values.transpose([table.scope.index(node) for node in present]))
    sizes = iter(values.shape)
    return values.reshape([next(sizes) if node in present else 1 for node in axes])
