"""Which sizes fit, by how few questions, for algorithms whose needs grow steadily, jump, or do neither."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from mucudnn.optimizer import PartSizes
from mucudnn.optimizer.part_sizes import MOST_ATTEMPTS

SIZES = [1, 2, 4, 8, 16, 32, 64]


def test_the_whole_is_asked_for_alone_where_it_fits() -> None:
    asked: list[int] = []
    sizes = PartSizes(SIZES, 100, lambda size: asked.append(size) or size)
    assert sizes.largest() == 64 and asked == [64]
    assert sizes.expected(16) == 16 and asked == [64]


def test_needs_are_interpolated_between_two_sizes() -> None:
    asked: list[int] = []
    sizes = PartSizes(SIZES, 30, lambda size: asked.append(size) or 10 + size)
    assert sizes.largest() == 16 and asked == [64, 1, 16]
    assert sizes.expected(32) == 42
    assert sizes.fitting == {1: 11, 16: 26}


def test_where_the_smallest_does_not_fit_nothing_else_is_asked_for() -> None:
    asked: list[int] = []
    sizes = PartSizes(SIZES, 30, lambda size: asked.append(size) or 50)
    assert sizes.largest() is None and asked == [64, 1]


def test_what_is_not_served_as_a_whole_may_be_in_parts() -> None:
    sizes = PartSizes(SIZES, 30, lambda size: None if size > 32 else 2)
    assert sizes.expected(64) == 0
    assert sizes.largest() in (8, 16, 32)
    assert sizes.expected(64) == math.inf


@given(
    st.lists(st.none() | st.integers(0, 100), min_size=len(SIZES), max_size=len(SIZES)),
    st.integers(0, 100),
    st.sampled_from(SIZES),
)
def test_the_largest_that_is_found_fits_and_was_asked_for(needs: list[int | None], limit: int, most: int) -> None:
    known, asked = dict(zip(SIZES, needs, strict=True)), list[int]()
    tried = [size for size in SIZES if size <= most]
    sizes = PartSizes(tried, limit, lambda size: asked.append(size) or known[size])
    found = sizes.largest()
    assert len(asked) == len(set(asked)) <= 2 + MOST_ATTEMPTS
    if found is not None:
        need = known[found]
        assert found in asked and need is not None and need <= limit and sizes.expected(found) == need
    else:
        assert 1 in asked and (known[1] is None or known[1] > limit)


def test_without_sizes_none_fits() -> None:
    assert PartSizes([], 30, lambda size: 0).largest() is None
