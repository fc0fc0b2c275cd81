"""Segments of a row against all divisions of it."""

from __future__ import annotations

import itertools
import math
import random

from mucudnn.optimizer.segments import cheapest


def total(begins: list[int], count: int, costs: dict[tuple[int, int], float]) -> float:
    return sum(costs[i, j] for i, j in itertools.pairwise([*begins, count]))


def test_the_cheapest_division_of_all() -> None:
    draws = random.Random(3)
    for _ in range(200):
        count = draws.randint(1, 8)
        longest = [draws.randint(1, 8) for _ in range(count)]
        costs = {
            (i, j): draws.randint(0, 20) if j - i <= longest[i] else math.inf
            for i in range(count)
            for j in range(i + 1, count + 1)
        }
        found = cheapest(count, lambda i, j, costs=costs: costs[i, j])  # type: ignore[misc]
        every = [[0, *rest] for k in range(count) for rest in itertools.combinations(range(1, count), k)]
        assert total(found, count, costs) == min(total(begins, count, costs) for begins in every)


def test_what_may_not_be_one_segment_is_not_asked_for_longer_ones() -> None:
    asked = []

    def cost(i: int, j: int) -> float:
        asked.append((i, j))
        return 1.0 if j - i < 3 else math.inf

    assert cheapest(5, cost) == [0, 1, 3]
    assert max(j - i for i, j in asked) == 3


def test_of_equal_costs_the_fewest_segments() -> None:
    assert cheapest(4, lambda i, j: float(j - i)) == [0]
    assert cheapest(0, lambda i, j: 1.0) == []
