"""Assignment: one candidate for every node of a graph so that the costs of nodes and edges add up to the least."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mucudnn.optimizer.elimination import Graph, least, width

Node = TypeVar("Node", bound=Hashable)
Numbers = npt.NDArray[np.float64]

MOST_ENTRIES = 2**27  # Entries of the largest table that is worked through; a graph that needs a larger one is refused.


def assign(costs: Mapping[Node, Sequence[float]], moves: Mapping[tuple[Node, Node], npt.ArrayLike]) -> dict[Node, int]:
    """The candidate of every node whose costs, with those of the moves between neighbours, add up to the least.

    Exact. Nodes are eliminated one by one: of a node and its neighbours, the best candidate of the node is found for
    all combinations of theirs, which makes one table among the neighbours (non-serial dynamic programming, Bertelè and
    Brioschi 1972). On a chain of layers this is the shortest path of Dryden et al. (IPDPS 2019). Residual networks and
    U-Nets need tables of two neighbours. The result depends on the numbers and on the order of `costs` only; of
    candidates that are equally good, the first of the node that is eliminated first counts.

    Args:
        costs: for every node, the seconds of each candidate; `math.inf` for one that cannot be taken.
        moves: for pairs of nodes, a matrix: the seconds between a candidate of the first (row) and one of the second
            (column). A pair may occur in both orders, and a node with itself, whose diagonal then counts.

    Returns:
        {node: index of its candidate}, in the order of `costs`.

    Raises:
        ValueError: one line, for a node without candidates, for a matrix that does not fit its nodes, for a number that
            is not one, where no choice is finite, and for a graph that needs a table of more than `MOST_ENTRIES`.
    """
    nodes, graph = graph_of(costs, moves)
    if (entries := width(graph)) > MOST_ENTRIES:
        raise ValueError(
            "costs and moves: too many nodes have moves between one another: this takes a table of"
            f" {entries:.0e} numbers; accepted: {MOST_ENTRIES:.0e}, with fewer moves or candidates"
        )
    chosen = least(graph)
    if chosen is None:
        raise ValueError("costs and moves: no choice of one candidate for each node is finite")
    return dict(zip(nodes, chosen, strict=True))


def cost_of(
    costs: Mapping[Node, Sequence[float]], moves: Mapping[tuple[Node, Node], npt.ArrayLike], chosen: Mapping[Node, int]
) -> float:
    """The cost of a choice, in seconds."""
    nodes = (float(costs[node][chosen[node]]) for node in costs)
    edges = (float(np.asarray(matrix)[chosen[a], chosen[b]]) for (a, b), matrix in moves.items())
    return math.fsum((*nodes, *edges))


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
