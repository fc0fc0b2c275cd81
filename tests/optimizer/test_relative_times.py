"""Forecasts from similar problems."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.optimizer import RelativeTimes

size = st.floats(1, 5)


def test_nothing_is_forecast_of_what_is_unknown() -> None:
    relative_times = RelativeTimes()
    relative_times.add("fft", (8, 64), 2.0)
    assert relative_times.forecast("gemm", (8, 64)) is None


def test_the_nearest_problem_counts_and_distance_makes_doubt() -> None:
    relative_times = RelativeTimes()
    relative_times.add("fft", (8, 64), 2.0)
    relative_times.add("fft", (8, 512), 0.25)
    assert relative_times.forecast("fft", (8, 64)) == (2.0, 2.0)
    ratio, uncertainty = relative_times.forecast("fft", (8, 256)) or (0.0, 0.0)
    assert ratio == 0.25 and uncertainty == pytest.approx(2.0 * 2)


@given(st.lists(st.tuples(size, size, st.floats(0.01, 100)), min_size=1, max_size=8), size, size)
def test_a_forecast_is_that_of_a_problem_as_near_as_any(
    known: list[tuple[float, float, float]], a: float, b: float
) -> None:
    relative_times = RelativeTimes()
    for one, other, ratio in known:
        relative_times.add("fft", (one, other), ratio)
    found = relative_times.forecast("fft", (a, b))
    latest = {(one, other): ratio for one, other, ratio in known}
    distances = {sizes: abs(math.log(sizes[0] / a)) + abs(math.log(sizes[1] / b)) for sizes in latest}
    least = min(distances.values())
    if found is None:
        assert 2 * math.exp(least) > 10 - 1e-9, "only what is not similar is left aside"
        return
    assert found[0] in {latest[sizes] for sizes in latest if distances[sizes] <= least + 1e-9}
    assert 2.0 <= found[1] <= 10.0 + 1e-9


def test_so_many_problems_are_known_those_that_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.optimizer.relative_times.MOST_PROBLEMS", 2)
    relative_times = RelativeTimes()
    for sizes, ratio in (((1.0,), 3.0), ((10.0,), 4.0), ((100.0,), 5.0)):
        relative_times.add("fft", sizes, ratio)
    assert relative_times.forecast("fft", (1.0,)) is None  # ten times as large is not similar
    assert relative_times.forecast("fft", (10.0,)) == (4.0, 2.0)
