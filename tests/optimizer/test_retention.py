"""What segments give up is the optimum of all choices."""

from __future__ import annotations

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from mucudnn.optimizer.retention import Retained, cheapest_retention, least_limit, least_seconds, peak_of

AMOUNTS = st.integers(0, 60)


@st.composite
def rows_of_units(draw: st.DrawFn) -> tuple[list[Retained], int]:
    units = draw(st.integers(1, 5))
    ways = [Retained(unit, unit + 1, 0.0, 0, draw(AMOUNTS)) for unit in range(units)]
    for _ in range(draw(st.integers(0, 6))):
        first = draw(st.integers(0, units - 1))
        end = draw(st.integers(first + 1, units))
        ways.append(Retained(first, end, draw(st.integers(1, 9)), draw(AMOUNTS), draw(AMOUNTS)))
    return ways, units


def all_choices(ways: list[Retained], units: int) -> list[list[Retained]]:
    """Every row of ways that covers the units."""
    found: list[list[Retained]] = [[]]
    complete = []
    while found:
        row = found.pop()
        at = row[-1].end if row else 0
        if at == units:
            complete.append(row)
        else:
            found += [[*row, way] for way in ways if way.first == at]
    return complete


@given(rows_of_units(), st.integers(0, 120))
def test_the_cheapest_choice_within_a_limit_is_found(row: tuple[list[Retained], int], limit: int) -> None:
    ways, units = row
    choices = [choice for choice in all_choices(ways, units) if peak_of(choice) <= limit]
    chosen = cheapest_retention(ways, units, limit)
    if not choices:
        assert chosen is None
        return
    assert chosen is not None
    assert peak_of(chosen) <= limit
    assert [way.first for way in chosen] == [0, *itertools.accumulate(way.end - way.first for way in chosen)][:-1]
    assert sum(way.seconds for way in chosen) == min(sum(way.seconds for way in choice) for choice in choices)


@given(rows_of_units(), AMOUNTS, st.integers(0, 120))
def test_no_choice_gives_up_enough_in_less_than_the_least_time(
    row: tuple[list[Retained], int], between: int, limit: int
) -> None:
    ways, units = row
    enough = [each for each in all_choices(ways, units) if between - sum(way.freed for way in each) <= limit]
    taken = [sum(way.seconds for way in each) for each in enough]
    assert least_seconds(ways, units, between, limit) == min(taken, default=math.inf)


@given(rows_of_units())
def test_the_least_limit_is_that_of_the_choice_that_needs_least(row: tuple[list[Retained], int]) -> None:
    ways, units = row
    least = min(peak_of(choice) for choice in all_choices(ways, units))
    found = least_limit(ways, units)
    assert found >= least
    assert found <= least + math.ceil(max(way.peak for way in ways) / 1000) + 1
    assert cheapest_retention(ways, units, found) is not None


def test_amounts_in_bytes_are_rounded_to_the_safe_side() -> None:
    ways = [
        Retained(0, 1, 0.0, 0, 50_000_000),
        Retained(0, 1, 1.0, 10_000_001, 50_000_000),
        Retained(1, 2, 0.0, 0, 60_000_000),
    ]
    assert [way.seconds for way in cheapest_retention(ways, 2, 51_000_000) or ()] == [1.0, 0.0]
    assert cheapest_retention(ways, 2, 49_999_999) is None


def test_without_a_limit_a_row_is_divided_into_its_cheapest_segments() -> None:
    draws = random.Random(3)
    for _ in range(200):
        count = draws.randint(1, 8)
        longest = [draws.randint(1, 8) for _ in range(count)]
        costs = {
            (i, j): draws.randint(0, 20) for i in range(count) for j in range(i + 1, min(i + longest[i], count) + 1)
        }
        row = cheapest_retention([Retained(i, j, cost, 1, 0) for (i, j), cost in costs.items()], count, math.inf)
        assert row is not None and [each.end for each in row] == [*(each.first for each in row[1:]), count]
        cuts = ([0, *rest, count] for k in range(count) for rest in itertools.combinations(range(1, count), k))
        totals = [
            (sum(costs[pair] for pair in itertools.pairwise(cut)), len(cut) - 1)
            for cut in cuts
            if costs.keys() >= set(itertools.pairwise(cut))
        ]
        assert (sum(each.seconds for each in row), len(row)) == min(totals)
