"""Which collectives of a graph are merged: pure, without ranks."""

from __future__ import annotations

import random

from distconv.transfer.merging import Collective, merged


def closed(pairs: list[tuple[str, list[int]]]) -> list[Collective]:
    """Collectives of (kind, those that each needs the result of), of one byte each."""
    found: list[Collective] = []
    for kind, needed in pairs:
        dependencies = 0
        for index in needed:
            dependencies |= 1 << index | found[index].dependencies
        found.append(Collective(kind, 1, dependencies))
    return found


def test_those_of_one_kind_that_need_nothing_of_each_other_become_one() -> None:
    assert merged(closed([("a", []), ("b", []), ("a", []), ("a", [0])]), 9) == [[0, 2], [1], [3]]


def test_nothing_becomes_larger_than_what_is_allowed() -> None:
    assert merged([Collective("a", 5, 0), Collective("a", 4, 0), Collective("a", 1, 0)], 9) == [[0, 1], [2]]
    assert merged([Collective("a", 10, 0), Collective("a", 10, 0)], 9) == [[0], [1]]


def test_what_two_merged_ones_need_together_comes_before_them() -> None:
    # 0 and 3 are one, so that 4 comes behind 1 as 3 does, and cannot be one with it.
    assert merged(closed([("a", []), ("b", []), ("c", [0]), ("a", [1]), ("b", [2])]), 9) == [[1], [0, 3], [2], [4]]


def test_a_chain_stays_as_it_is() -> None:
    assert merged(closed([("a", []), *(("a", [index]) for index in range(5))]), 9) == [[index] for index in range(6)]


def test_every_order_has_each_collective_once_and_behind_what_it_needs() -> None:
    draw = random.Random(0)
    for _ in range(300):
        count = draw.randrange(1, 14)
        given = closed(
            [(draw.choice("abc"), [at for at in range(index) if draw.random() < 0.2]) for index in range(count)]
        )
        plan = merged(given, 3)
        done = 0
        for members in plan:
            assert len({given[index].kind for index in members}) == 1 and len(members) <= 3
            for index in members:
                assert not given[index].dependencies & ~done
            done |= sum(1 << index for index in members)
        assert done == (1 << count) - 1
