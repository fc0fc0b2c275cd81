"""Peak-neutral budgets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.optimizer import StepTimeline, common

moments = st.lists(st.integers(0, 1000), min_size=1, max_size=20)


@given(moments, st.integers(0, 500), st.one_of(st.just(math.inf), st.integers(0, 2000)))
def test_workspaces_of_the_budgets_fill_up_to_the_ceiling(live: list[int], above: int, limit: float) -> None:
    timeline = StepTimeline(tuple(live), max(live) + above)
    ceiling = timeline.peak if limit == math.inf else limit
    for alive, budget in zip(live, timeline.budgets(limit), strict=True):
        assert budget >= 0
        assert alive + budget == max(alive, ceiling)


@given(st.lists(st.tuples(moments, st.integers(0, 100)), min_size=1, max_size=4))
def test_common_budgets_suit_every_step(steps: list[tuple[list[int], int]]) -> None:
    shortest = min(len(live) for live, _ in steps)
    timelines = [StepTimeline(tuple(live[:shortest]), max(live) + above) for live, above in steps]
    budgets = common(timelines).budgets()
    for timeline in timelines:
        assert all(budget <= own for budget, own in zip(budgets, timeline.budgets(), strict=True))
    assert common(timelines[:1]) == timelines[0]


def test_wrong_timelines() -> None:
    with pytest.raises(ValueError, match="peak=3"):
        StepTimeline((1, 4), 3)
    for timelines in ([], [StepTimeline((1,), 1), StepTimeline((1, 1), 1)]):
        with pytest.raises(ValueError, match="one length"):
            common(timelines)
