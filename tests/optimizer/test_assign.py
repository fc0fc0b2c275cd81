"""The choice of one candidate per node: against brute force, and what it promises."""

from __future__ import annotations

import itertools
import math
import sys
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mucudnn.optimizer import DoesNotFit, assign, elimination
from tests.optimizer.longest_path import cost_of, longest_path_first

ASSIGN = sys.modules["mucudnn.optimizer.assign"]

Costs = dict[str, list[float]]
Moves = dict[tuple[str, str], list[list[float]]]


def chain(layers: int) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(layers - 1)]


def residual(blocks: int) -> list[tuple[int, int]]:
    """Blocks of two layers and a sum, each sum fed by the one before too."""
    edges = []
    for block in range(blocks):
        start = 3 * block
        edges += [(start, start + 1), (start + 1, start + 2), (start + 2, start + 3), (start, start + 3)]
    return edges


def unet(levels: int) -> list[tuple[int, int]]:
    """A chain down and up, with an edge from every layer on the way down to its fellow on the way up."""
    last = 2 * levels
    return chain(last + 1) + [(level, last - level) for level in range(levels)]


SHAPES = {
    "chain": chain(6),
    "residual": residual(2),
    "unet": unet(3),
    "clique": list(itertools.combinations(range(4), 2)),
}


@st.composite
def problems(draw: st.DrawFn) -> tuple[Costs, Moves, Costs]:
    edges = draw(st.sampled_from(list(SHAPES.values())))
    count = max(max(edge) for edge in edges) + 1
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = numbers.integers(1, 4, count)
    grid = draw(st.booleans())  # small whole numbers make ties

    def some(*shape: int) -> list:
        return (numbers.integers(0, 4, shape).astype(float) if grid else numbers.random(shape)).tolist()

    costs = {f"n{i}": some(int(size)) for i, size in enumerate(sizes)}
    moves = {(f"n{a}", f"n{b}"): some(int(sizes[a]), int(sizes[b])) for a, b in edges}
    return costs, moves, {node: some(len(cost)) for node, cost in costs.items()}


def choices(costs: Costs) -> list[dict[str, int]]:
    return [
        dict(zip(costs, index, strict=True)) for index in itertools.product(*(range(len(c)) for c in costs.values()))
    ]


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_least_sum_is_that_of_brute_force(problem: tuple[Costs, Moves, Costs]) -> None:
    costs, moves, _ = problem
    chosen = assign(costs, moves).chosen
    assert list(chosen) == list(costs)
    assert cost_of(costs, moves, chosen) == pytest.approx(min(cost_of(costs, moves, one) for one in choices(costs)))
    assert assign(costs, moves).chosen == chosen
    assert cost_of(costs, moves, longest_path_first(costs, moves)) >= cost_of(costs, moves, chosen) - 1e-12


@settings(max_examples=20, deadline=None)
@given(problems(), st.floats(0, 1))
def test_within_a_limit_the_choice_is_that_of_brute_force(problem: tuple[Costs, Moves, Costs], share: float) -> None:
    costs, moves, bytes_ = problem

    def taken(one: dict[str, int]) -> float:
        return math.fsum(bytes_[node][index] for node, index in one.items())

    every = choices(costs)
    lightest, heaviest = min(map(taken, every)), max(map(taken, every))
    limit = lightest + share * (heaviest - lightest)
    with patch.multiple(ASSIGN, MOST_BRANCHES=100_000, TOLERANCE=1e-12):
        found = assign(costs, moves, bytes_, limit)
    best = min(cost_of(costs, moves, one) for one in every if taken(one) <= limit)
    assert taken(found.chosen) <= limit
    assert found.seconds == pytest.approx(cost_of(costs, moves, found.chosen))
    assert found.seconds == pytest.approx(best) and found.gap < 1e-6
    with patch.multiple(ASSIGN, MOST_BRANCHES=0, TOLERANCE=1e-12):
        hurried = assign(costs, moves, bytes_, limit)
    assert hurried.bound <= best + 1e-9 and best <= hurried.seconds + 1e-9
    if lightest > 0:
        with pytest.raises(DoesNotFit) as refused:
            assign(costs, moves, bytes_, lightest * 0.99)
        assert refused.value.least == pytest.approx(lightest)


def test_a_graph_that_is_not_narrow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    costs: Costs = {"a": [3, 1], "b": [1, 1], "c": [0, 5]}
    moves: Moves = {("a", "b"): [[0, 2], [2, 0]], ("b", "c"): [[0, 1], [9, 9]], ("c", "a"): [[0, 4], [0, 0]]}
    assert cost_of(costs, moves, assign(costs, moves).chosen) == 4
    monkeypatch.setattr(ASSIGN, "MOST_ENTRIES", 1)
    with pytest.raises(ValueError, match="too many nodes have moves between one another"):
        assign(costs, moves)


def test_what_cannot_be_taken_is_not_taken() -> None:
    inf = math.inf
    assert assign({"a": [0, 1], "b": [0, 1]}, {("a", "b"): [[inf, inf], [0, inf]]}).chosen == {"a": 1, "b": 0}
    with pytest.raises(ValueError, match="no choice"):
        assign({"a": [0], "b": [0]}, {("a", "b"): [[inf]]})


def test_a_pair_in_both_orders_and_with_itself_adds_up() -> None:
    costs: Costs = {"a": [0, 0], "b": [0, 0]}
    moves: Moves = {("a", "b"): [[5, 0], [0, 5]], ("b", "a"): [[0, 1], [2, 0]], ("a", "a"): [[4, 9], [9, 0]]}
    assert assign(costs, moves).chosen == {"a": 1, "b": 0}
    assert cost_of(costs, moves, {"a": 1, "b": 0}) == 1


@pytest.mark.parametrize(
    ("costs", "moves", "complaint"),
    [
        ({"a": []}, {}, "costs['a']"),
        ({"a": [math.nan]}, {}, "NaN"),
        ({"a": [0]}, {("a", "b"): [[0]]}, "no node 'b'"),
        ({"a": [0], "b": [0, 0]}, {("a", "b"): [[0], [0]]}, "accepted: (1, 2)"),
        ({"a": [0], "b": [0]}, {("a", "b"): [[math.nan]]}, "NaN"),
    ],
)
def test_bad_input_is_one_line(costs: Costs, moves: Moves, complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        assign(costs, moves)
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


def test_residual_networks_and_unets_stay_narrow() -> None:
    for edges in (chain(60), residual(16), unet(20)):
        count = max(max(edge) for edge in edges) + 1
        graph = elimination.Graph([np.zeros(10)] * count, {edge: np.zeros((10, 10)) for edge in edges})
        assert elimination.width(graph) <= 10**3


def test_the_longest_path_first_can_be_worse() -> None:
    """The long path settles on candidate 0, for which the two short branches then pay."""
    costs: Costs = {"a": [0, 1], "b": [0, 1], "c": [0, 1], "s": [9, 0], "t": [9, 0]}
    same = [[0.0, 99.0], [99.0, 0.0]]
    moves: Moves = {("a", "b"): same, ("b", "c"): same, ("a", "s"): same, ("b", "t"): same}
    first, best = longest_path_first(costs, moves), assign(costs, moves).chosen
    assert cost_of(costs, moves, best) == 3 < cost_of(costs, moves, first) == 18
