"""Partitions and one reused workspace, chosen together: against brute force, and what more memory does."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mucudnn.optimizer import DoesNotFit, Option, assign, assign_reusing, desirable_set
from mucudnn.optimizer.assign import cost_of

SHAPES = {
    "chain": [(0, 1), (1, 2)],
    "residual": [(0, 1), (1, 2), (0, 2)],
    "branches": [(0, 1), (0, 2)],
}

Sets = dict[str, list[list[tuple[float, float]]]]
Moves = dict[tuple[str, str], list[list[float]]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Sets, Moves, dict[str, list[float]]]:
    edges = draw(st.sampled_from(list(SHAPES.values())))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = numbers.integers(1, 4, 3)

    def some(*shape: int) -> list:
        return numbers.integers(0, 8, shape).astype(float).tolist()

    def ways() -> list[tuple[float, float]]:
        options = [Option(1, "a", float(numbers.integers(1, 9)), int(numbers.integers(0, 6))) for _ in range(3)]
        return [(option.seconds, float(option.workspace)) for option in desirable_set(options)]

    sets = {f"n{i}": [ways() for _ in range(size)] for i, size in enumerate(sizes)}
    moves = {(f"n{a}", f"n{b}"): some(int(sizes[a]), int(sizes[b])) for a, b in edges}
    return sets, moves, {node: some(len(found)) for node, found in sets.items()}


def every(sets: Sets, moves: Moves, sizes: dict[str, list[float]]) -> list[tuple[float, float]]:
    """(bytes with the largest workspace, seconds) of every choice of candidates and ways."""
    found = []
    for chosen in itertools.product(*(range(len(each)) for each in sets.values())):
        at = dict(zip(sets, chosen, strict=True))
        own = math.fsum(sizes[node][index] for node, index in at.items())
        for ways in itertools.product(*(sets[node][index] for node, index in at.items())):
            seconds = [[0.0] * index + [way[0]] for index, way in zip(chosen, ways, strict=True)]
            total = cost_of(dict(zip(sets, seconds, strict=True)), moves, at)
            found.append((own + max(size for _, size in ways), total))
    return found


@settings(max_examples=60, deadline=None)
@given(problems(), st.floats(0, 1))
def test_the_joint_choice_is_that_of_brute_force(
    problem: tuple[Sets, Moves, dict[str, list[float]]], share: float
) -> None:
    sets, moves, sizes = problem
    choices = every(sets, moves, sizes)
    lightest, heaviest = min(choices)[0], max(choices)[0]
    limit = lightest + share * (heaviest - lightest)
    found = assign_reusing(sets, moves, sizes, limit, most_branches=100_000, tolerance=0)
    assert found.seconds == pytest.approx(min(seconds for taken, seconds in choices if taken <= limit))
    assert found.gap < 1e-6
    assert found.bytes + found.workspace <= limit
    taken = {node: sets[node][at][found.ways[node]] for node, at in found.chosen.items()}
    assert max(size for _, size in taken.values()) == found.workspace
    costs = {node: [seconds for seconds, _ in (min(ways) for ways in each)] for node, each in sets.items()}
    assert found.seconds >= cost_of(costs, moves, assign(costs, moves)) - 1e-12
    if lightest > 0:
        with pytest.raises(DoesNotFit) as refused:
            assign_reusing(sets, moves, sizes, lightest * 0.99, tolerance=0)
        assert refused.value.least == pytest.approx(lightest)


@settings(max_examples=30, deadline=None)
@given(problems())
def test_more_memory_never_makes_the_choice_slower(problem: tuple[Sets, Moves, dict[str, list[float]]]) -> None:
    sets, moves, sizes = problem
    limits = sorted({taken for taken, _ in every(sets, moves, sizes)})
    seconds = [assign_reusing(sets, moves, sizes, limit, 100_000, 0).seconds for limit in limits]
    assert seconds == sorted(seconds, reverse=True)


@settings(max_examples=30, deadline=None)
@given(problems(), st.integers(0, 2**32 - 1))
def test_more_candidates_never_make_the_choice_slower(
    problem: tuple[Sets, Moves, dict[str, list[float]]], seed: int
) -> None:
    """As with more ranks, some of which may stay idle: what fewer can do is among what more can."""
    sets, moves, sizes = problem
    fewer = assign_reusing(sets, moves, sizes, math.inf, tolerance=0).seconds
    numbers = np.random.default_rng(seed)
    node = next(iter(sets))
    more = {**sets, node: [*sets[node], [(float(numbers.integers(0, 9)), 0.0)]]}
    wider = {
        (a, b): ([*table, numbers.integers(0, 8, len(table[0])).astype(float).tolist()] if a == node else table)
        for (a, b), table in moves.items()
    }
    assert assign_reusing(more, wider, {**sizes, node: [*sizes[node], 0.0]}, math.inf, tolerance=0).seconds <= fewer


def test_a_node_without_a_way_is_refused() -> None:
    with pytest.raises(ValueError, match="no choice"):
        assign_reusing({"a": [[]], "b": [[(1.0, 2.0)]]}, {}, {"a": [0], "b": [0]}, 5)
