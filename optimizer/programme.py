"""The multiple-choice knapsack as an integer linear programme, solved through PuLP."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

from mucudnn.optimizer.knapsack import Group, Solution, relaxed

SOLVERS = {"HiGHS": "pulp highspy", "CBC": "pulp"}
"""The solvers by name, the preferred first, and the packages that contain them."""

_SCALE = 1e4
"""The total and the seconds are scaled to this number: solvers keep constraints, and prove optima, to about 1e-7."""


def installed() -> list[str]:
    """The solvers that can be used here."""
    return [
        name
        for name, packages in SOLVERS.items()
        if all(importlib.util.find_spec(package) is not None for package in packages.split())
    ]


def command(solver: str, time_limit: float) -> Any:
    """PuLP's command of one of `installed()`, which proves its optimum within `time_limit` seconds, or stops."""
    import pulp

    if solver == "HiGHS":
        return pulp.HiGHS(msg=False, timeLimit=time_limit, gapRel=0.0)
    return pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit, gapRel=0.0, gapAbs=0.0)


def solve(groups: Sequence[Group], total: int, solver: str, time_limit: float) -> Solution:
    """The choice with the least sum of seconds whose bytes add up to `total` at most.

    Equal groups share their variables, which then count how many of them take an item.

    Args:
        groups: their lightest items together fit the total.
        total: bytes.
        solver: one of `installed()`.
        time_limit: seconds, after which the best choice known is taken, with its bound.
    """
    start = relaxed(groups, total)
    if start.proven:
        return start
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # about version 4, which needs a newer Python than this project
        items, optimal = _solved(groups, total, solver, time_limit, start.seconds)
    if items is None or sum(int(group.bytes[item]) for group, item in zip(groups, items, strict=True)) > total:
        return start  # the solver found nothing, or within its tolerance exceeded the total
    seconds = sum(float(group.seconds[item]) for group, item in zip(groups, items, strict=True))
    return Solution(items, seconds, seconds if optimal else start.bound)


def _solved(
    groups: Sequence[Group], total: int, solver: str, time_limit: float, seconds: float
) -> tuple[list[int] | None, bool]:
    """The items that the solver finds, and whether they are proven best; `seconds`, about their sum, sets the scale."""
    import pulp

    equal: dict[tuple[bytes, bytes], list[int]] = {}
    for index, group in enumerate(groups):
        equal.setdefault((group.bytes.tobytes(), group.seconds.tobytes()), []).append(index)

    problem = pulp.LpProblem("workspace_division", pulp.LpMinimize)
    variables = [
        [
            pulp.LpVariable(f"x{kind}_{item}", 0, len(members), "Integer")
            for item in range(len(groups[members[0]].bytes))
        ]
        for kind, members in enumerate(equal.values())
    ]
    terms = [
        (variable, groups[members[0]].seconds[item], groups[members[0]].bytes[item])
        for members, items in zip(equal.values(), variables, strict=True)
        for item, variable in enumerate(items)
    ]
    problem += pulp.LpAffineExpression([(variable, float(_SCALE * s / seconds)) for variable, s, _ in terms])
    problem += pulp.LpAffineExpression([(variable, float(_SCALE * b / total)) for variable, _, b in terms]) <= _SCALE
    for members, items in zip(equal.values(), variables, strict=True):
        problem += pulp.lpSum(items) == len(members)
    problem.solve(command(solver, time_limit))
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None, False
    items = [0] * len(groups)
    for members, counts in zip(equal.values(), variables, strict=True):
        taken = [item for item, count in enumerate(counts) for _ in range(round(count.value()))]
        for index, item in zip(members, taken, strict=True):
            items[index] = item
    return items, problem.sol_status == pulp.LpSolutionOptimal
