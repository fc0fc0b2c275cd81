"""Processes that share what they measure: every piece once, and the same plan for all. Threads stand in for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from boards import Shared
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.convolution.tile import Part
from mucudnn.planning.plan import Plan
from mucudnn.planning.planner import Planner
from mucudnn.providers.fft import Fft
from mucudnn.providers.gemm import Gemm
from mucudnn.providers.stock import Stock
from mucudnn.settings import Settings
from mucudnn.timing.board import Board
from mucudnn.timing.measurement import Measurement
from mucudnn.timing.store import Store

PROBLEM = ConvProblem.of_convolution(
    Direction.FORWARD, (8, 4, 48, 48), (4, 4, 15, 15), stride=(1, 1), padding=(7, 7), dilation=(1, 1)
)


def planned(board: Board | None, store: Store | None = None) -> Plan:
    settings = Settings.from_environment({}, database=":memory:", progress="off")
    planner = Planner(settings, store or Store(":memory:"), board=board)
    return planner.plan(planner.measurement(PROBLEM))


def test_all_come_to_one_plan_from_times_that_differ() -> None:
    torch.set_num_threads(1)
    board = Shared()
    with ThreadPoolExecutor(4) as ranks:
        plans = list(ranks.map(lambda _: planned(board), range(4)))
    assert all(plan == plans[0] for plan in plans)
    assert set(board.posts.values()) == {1}
    assert planned(board) == plans[0]  # who comes late finds all there


def test_what_a_database_knows_does_not_set_its_owner_apart() -> None:
    board, store = Shared(), Store(":memory:")
    own = planned(None, store)
    first = planned(board)
    assert planned(board, store).record.stock_seconds == first.record.stock_seconds != own.record.stock_seconds
    assert planned(None, store) == own


def test_what_one_finds_wrong_all_know(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Fft.launch

    def wrong(self: Fft, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        launch(self, algorithm, parts, accumulate)
        parts[0].result[..., -1] += 1

    monkeypatch.setattr(Fft, "launch", wrong)
    for other in (Gemm, Stock):
        monkeypatch.setattr(other, "algorithms", lambda provider, problem: ())
    monkeypatch.setattr(Measurement, "stock_seconds", lambda measurement: 1.0)  # so that something faster is found
    board = Shared()
    with pytest.warns(RuntimeWarning, match="fft computed"):
        plans = [planned(board) for _ in range(2)]
    assert [dict(plan.record.wrong).keys() for plan in plans] == [{"fft"}] * 2


def test_who_lacks_an_algorithm_of_the_posted_plan_says_so_and_plans_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Measurement, "stock_seconds", lambda measurement: 1.0)  # so that something faster is found
    board = Shared()
    theirs = planned(board)
    used = {algorithm for algorithm, _ in theirs.division.runs()}
    for provider in (Fft, Gemm, Stock):
        own = provider.algorithms
        monkeypatch.setattr(
            provider, "algorithms", lambda self, problem, own=own: [n for n in own(self, problem) if n not in used]
        )
    ours = planned(board)
    (told,) = caplog.messages
    assert f"lacks {', '.join(sorted(used))} of the plan of the others" in told
    assert used.isdisjoint(algorithm for algorithm, _ in ours.division.runs())


def test_after_a_failure_another_one_measures_for_all(caplog: pytest.LogCaptureFixture) -> None:
    board, key = Shared(), {"work": "stock"}

    def fail() -> float:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        board.once(key, fail)
    assert [board.once(key, lambda value=value: value) for value in (2.0, 3.0)] == [2.0, 2.0]
    assert "failed to measure stock" in caplog.text


@given(st.one_of(st.floats(0, 1e9), st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False)))))
def test_numbers_arrive_to_the_bit(value: object) -> None:
    board = Shared()
    assert board.once({"work": 1}, lambda: value) == value
    assert board.once({"work": 1}, lambda: None) == value
