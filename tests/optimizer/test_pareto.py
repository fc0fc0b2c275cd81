"""The desirable set against its definition."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from mucudnn.optimizer import Division, Option, best_division, desirable_divisions, desirable_set

item = st.builds(
    Option, extent=st.just(1), algorithm=st.sampled_from("abc"), seconds=st.integers(0, 8), workspace=st.integers(0, 8)
)


def dominates(a: Option, b: Option) -> bool:
    return (
        a.seconds <= b.seconds and a.workspace <= b.workspace and (a.seconds, a.workspace) != (b.seconds, b.workspace)
    )


@given(st.lists(item, max_size=20))
def test_keeps_exactly_what_nothing_dominates(items: list[Option]) -> None:
    kept = desirable_set(items)
    costs = [(option.workspace, option.seconds) for option in kept]
    expected = {(i.workspace, i.seconds) for i in items if not any(dominates(other, i) for other in items)}
    assert set(costs) == expected
    assert len(costs) == len(expected)
    assert costs == sorted(costs)
    assert all(option in items for option in kept)


launch = st.builds(
    Option,
    extent=st.integers(1, 7),
    algorithm=st.sampled_from("abc"),
    seconds=st.integers(0, 64).map(lambda units: units / 8),  # exact in binary: sums compare with ==
    workspace=st.integers(0, 12),
)


def every_division(options: list[Option], extent: int) -> Iterator[Division]:
    """All multisets of launches that add up to the extent."""
    if extent == 0:
        yield Division(())
    for index, option in enumerate(options):
        if option.extent <= extent:
            for rest in every_division(options[index:], extent - option.extent):
                yield Division((option, *rest.options))


@given(st.lists(launch, max_size=6), st.integers(0, 7))
def test_divisions_are_those_that_no_division_dominates(options: list[Option], extent: int) -> None:
    expected = desirable_set(every_division(options, extent))
    actual = desirable_divisions(options, extent)
    assert [(d.workspace, d.seconds) for d in actual] == [(d.workspace, d.seconds) for d in expected]
    for division in actual:
        assert division.extent == extent
        assert set(division.options) <= set(options)


@given(st.lists(launch, max_size=12), st.integers(1, 14), st.integers(0, 14))
def test_within_any_limit_lies_the_fastest_division(options: list[Option], extent: int, limit: int) -> None:
    within = [division for division in desirable_divisions(options, extent) if division.workspace <= limit]
    best = best_division(options, extent, limit)
    assert (within[-1].seconds if within else None) == (None if best is None else best.seconds)


def test_of_equal_divisions_the_one_with_the_fewest_parts() -> None:
    options = [Option(1, "small", 1.0, 0), Option(4, "whole", 4.0, 0), Option(2, "half", 2.0, 0)]
    assert desirable_divisions(options, 4) == [Division((options[1],))]


def test_what_does_not_add_up() -> None:
    assert desirable_divisions([Option(3, "fft", 1.0, 0)], 4) == []
