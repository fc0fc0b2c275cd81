"""WR against brute force over every multiset of launches."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.optimizer import Division, Option, best_division, micro_batch_sizes


def options(max_extent: int) -> st.SearchStrategy[list[Option]]:
    option = st.builds(
        Option,
        extent=st.integers(1, max_extent),
        algorithm=st.sampled_from("abc"),
        seconds=st.integers(0, 64).map(lambda units: units / 8),  # exact in binary: sums compare with ==
        workspace=st.integers(0, 20),
    )
    return st.lists(option, max_size=12)


def brute_force_seconds(candidates: list[Option], extent: int) -> float:
    """The least time over all sequences of launches that cover the extent exactly."""

    @cache
    def least(remaining: int) -> float:
        if remaining == 0:
            return 0.0
        fitting = [option for option in candidates if option.extent <= remaining]
        return min((option.seconds + least(remaining - option.extent) for option in fitting), default=math.inf)

    return least(extent)


@given(options(9), st.integers(1, 14), st.integers(0, 22))
def test_division_is_the_fastest_that_fits(candidates: list[Option], extent: int, limit: int) -> None:
    division = best_division(candidates, extent, limit)
    expected = brute_force_seconds([option for option in candidates if option.workspace <= limit], extent)
    if division is None:
        assert expected == math.inf
        return
    assert division.seconds == expected
    assert division.extent == extent
    assert division.workspace <= limit
    assert set(division.options) <= set(candidates)


def test_ties_go_to_the_fewest_parts() -> None:
    candidates = [Option(1, "small", 1.0, 0), Option(4, "whole", 4.0, 0)]
    assert best_division(candidates, 4, math.inf) == Division((candidates[1],))


def test_runs_put_neighbours_of_one_algorithm_together() -> None:
    candidates = [Option(4, "fft", 1.0, 4), Option(1, "gemm", 1.0, 1), Option(2, "fft", 0.6, 2)]
    division = best_division(candidates, 7, 4)
    assert division is not None
    assert division.runs() == (("fft", (4, 2)), ("gemm", (1,)))


def test_nothing_fits() -> None:
    assert best_division([Option(4, "fft", 1.0, 100)], 4, 99) is None
    assert best_division([Option(3, "fft", 1.0, 0)], 4, math.inf) is None


def test_an_empty_batch_needs_no_launch() -> None:
    division = best_division([Option(1, "fft", 1.0, 0)], 0, 0)
    assert division is not None
    assert (division.options, division.seconds, division.workspace) == ((), 0, 0)


@pytest.mark.parametrize(
    ("policy", "extent", "sizes"),
    [
        ("undivided", 12, [12]),
        ("powerOfTwo", 12, [1, 2, 4, 8, 12]),
        ("powerOfTwo", 8, [1, 2, 4, 8]),
        ("powerOfTwo", 1, [1]),
        ("all", 3, [1, 2, 3]),
    ],
)
def test_policies(policy: str, extent: int, sizes: list[int]) -> None:
    assert micro_batch_sizes(policy, extent) == sizes


def test_unknown_policy_names_what_is_accepted() -> None:
    with pytest.raises(ValueError, match="policy='half': accepted are undivided, powerOfTwo, all"):
        micro_batch_sizes("half", 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"extent": 0},
        {"seconds": -1.0},
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"workspace": -1},
    ],
)
def test_options_refuse_what_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Option(**{"extent": 1, "algorithm": "fft", "seconds": 1.0, "workspace": 0, **wrong})  # type: ignore[arg-type]
