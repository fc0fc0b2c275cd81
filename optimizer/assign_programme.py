"""The assignment problem as an integer programme: it checks the other solver, and solves graphs too wide for that."""

from __future__ import annotations

import math
import warnings

import numpy as np

from mucudnn.optimizer import programme
from mucudnn.optimizer.elimination import Graph

_SCALE = 1e4
"""Seconds are scaled so that the dearest finite one is this: solvers prove optima to about 1e-7."""


def solve(graph: Graph, time_limit: float = 600.0) -> list[int] | None:
    """The candidate of each node with the least sum, proven; None where no choice is finite.

    One variable for each candidate, and for each edge one for each pair of candidates, whose sums along rows and
    columns are those of the candidates (the local polytope; Alpa, Zheng et al. 2022, linearises edges in the same way).

    Raises:
        ModuleNotFoundError: without PuLP.
        ValueError: where the solver does not prove an optimum within `time_limit` seconds.
    """
    solvers = programme.installed()
    if not solvers:
        raise ModuleNotFoundError("this graph is solved as an integer programme: pip install 'mucudnn-distconv[ilp]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about version 4 of PuLP, which needs a newer Python
        return _solved(graph, solvers[0], time_limit)


def _solved(graph: Graph, solver: str, time_limit: float) -> list[int] | None:
    import pulp

    numbers = np.concatenate([*graph.costs, *(table.ravel() for table in graph.moves.values())])
    scale = _SCALE / max(float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0)), math.ulp(0.0) * 2**60)
    problem = pulp.LpProblem("assignment", pulp.LpMinimize)
    terms = []

    def add(name: str, seconds: float, kind: str) -> pulp.LpVariable:
        variable = pulp.LpVariable(name, 0, 1 if math.isfinite(seconds) else 0, kind)
        terms.append((variable, seconds * scale if math.isfinite(seconds) else 0.0))
        return variable

    nodes = [
        [add(f"x{node}_{index}", float(seconds), "Integer") for index, seconds in enumerate(cost)]
        for node, cost in enumerate(graph.costs)
    ]
    edges = {
        (a, b): [
            [add(f"y{a}_{b}_{i}_{j}", float(seconds), "Continuous") for j, seconds in enumerate(row)]
            for i, row in enumerate(table)
        ]
        for (a, b), table in graph.moves.items()
    }
    problem += pulp.LpAffineExpression(terms)
    for variables in nodes:
        problem += pulp.lpSum(variables) == 1
    for (a, b), pairs in edges.items():
        for variable, row in zip(nodes[a], pairs, strict=True):
            problem += pulp.lpSum(row) == variable
        for variable, column in zip(nodes[b], zip(*pairs, strict=True), strict=True):
            problem += pulp.lpSum(column) == variable
    problem.solve(programme.command(solver, time_limit))
    if problem.status == pulp.LpStatusInfeasible:
        return None
    if problem.sol_status != pulp.LpSolutionOptimal:
        raise ValueError(f"the integer programme was not solved within {time_limit:g} s")
    return [int(np.argmax([variable.value() for variable in variables])) for variables in nodes]
