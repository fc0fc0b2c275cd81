"""The heuristic that `assign` is compared with: the longest path first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mucudnn.optimizer.assign import graph_of
from mucudnn.optimizer.elimination import Graph, least

Node = TypeVar("Node")


def cost_of(
    costs: Mapping[Node, Sequence[float]], moves: Mapping[tuple[Node, Node], npt.ArrayLike], chosen: Mapping[Node, int]
) -> float:
    """The cost of a choice, in seconds."""
    nodes = (float(costs[node][chosen[node]]) for node in costs)
    edges = (float(np.asarray(matrix)[chosen[a], chosen[b]]) for (a, b), matrix in moves.items())
    return math.fsum((*nodes, *edges))


def longest_path_first(
    costs: Mapping[Node, Sequence[float]], moves: Mapping[tuple[Node, Node], npt.ArrayLike]
) -> dict[Node, int]:
    """The choice by the heuristic of Dryden et al. (IPDPS 2019, section V-C), to compare `assign` with.

    The path with the most nodes gets its best candidates, by a shortest path; then the longest path of what is left,
    given those, and so on. Edges go from the first node of a pair to the second, and make no circle.

    Raises:
        ValueError: as `assign`; also for edges in a circle.
    """
    nodes, graph = graph_of(costs, moves)
    edges = [tuple(nodes.index(node) for node in pair) for pair in moves]
    unary = [cost.copy() for cost in graph.costs]
    chosen: dict[int, int] = {}
    while len(chosen) < len(nodes):
        path = _longest_path(len(nodes), [(a, b) for a, b in edges if a not in chosen and b not in chosen], chosen)
        within = {(path.index(a), path.index(b)): graph.moves[a, b] for a, b in graph.moves if a in path and b in path}
        along = {(a, b): table for (a, b), table in within.items() if abs(a - b) == 1}
        found = least(Graph([unary[node] for node in path], along))
        if found is None:
            raise ValueError("costs and moves: the longest path has no finite choice beside those made before")
        chosen.update(zip(path, found, strict=True))
        for (a, b), table in graph.moves.items():
            if a in path and b not in chosen:
                unary[b] += table[chosen[a]]
            if b in path and a not in chosen:
                unary[a] += table[:, chosen[b]]
    return {node: chosen[index] for index, node in enumerate(nodes)}


def _longest_path(count: int, edges: Sequence[tuple[int, ...]], taken: Mapping[int, int]) -> list[int]:
    before: dict[int, list[int]] = {node: [] for node in range(count) if node not in taken}
    for a, b in edges:
        if a != b:
            before[b].append(a)
    length: dict[int, tuple[int, int | None]] = {}
    waiting = list(before)
    while waiting:
        ready = [node for node in waiting if all(other in length for other in before[node])]
        if not ready:
            raise ValueError("moves: the edges make a circle, so there is no longest path")
        for node in ready:
            steps = [(length[other][0] + 1, -other) for other in before[node]]
            longest, last = max(steps, default=(1, 1))
            length[node] = (longest, None if last == 1 else -last)
        waiting = [node for node in waiting if node not in length]
    at: int | None = max(length, key=lambda node: (length[node][0], -node))
    path = []
    while at is not None:
        path.append(at)
        at = length[at][1]
    return path[::-1]
