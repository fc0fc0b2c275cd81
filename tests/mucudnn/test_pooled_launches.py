"""Processes that explore one problem together, on a made-up machine."""

from __future__ import annotations

import math

import pytest
from boards import Shared

from mucudnn.optimizer import Exploration, Key, OverheadBudget, Trial, Variant
from mucudnn.runtime.explored import shared_out
from mucudnn.runtime.pooled_launches import PATIENCE, PooledLaunches

SIZES = {1: 0, 2: 0, 4: 0, 8: 0}
SECONDS = {"stock": 0.15, "fft": 0.06, "gemm": 0.05, "onednn": 0.2}
"""Of a sample, by algorithm; torch's own kernel on the whole takes a second."""


class Process:
    """One of those that explore.

    Attributes:
        slow: how many times longer everything takes here.
        tried: launches that were timed here first.
    """

    def __init__(self, board: Shared, slow: float = 1.0) -> None:
        self.slow, self.tried = slow, list[Key]()
        variants = [Variant("batch", name, 8, SIZES, 0.9 * slow, 50.0) for name in ("fft", "gemm", "onednn")]
        variants.append(
            Variant("batch", "stock", 8, {1: 0, 2: 0, 4: 0}, 1.0 * slow, 1.5, dict.fromkeys(range(1, 8), 0))
        )
        self.exploration = Exploration("stock", [slow] * 2, variants, OverheadBudget(balance=math.inf), (0.05, 0.15))
        self.pool = PooledLaunches(board, {"problem": "one"}, "stock")
        self.failing = ""

    def next(self) -> Trial | None:
        return shared_out(self.exploration, self.pool)

    def compute(self, trial: Trial | None) -> None:
        if trial is None:
            return
        if trial.division is None:
            self.exploration.learn(trial, self.slow)
            return
        if any(option.algorithm == self.failing for option in trial.division.options):
            self.exploration.fail(trial, self.failing, 1)
            return
        fresh = self.exploration.fresh(trial) if trial.by_launch else []
        self.tried += fresh
        seconds = [self.slow * option.extent * SECONDS[option.algorithm] for option in trial.division.options]
        self.exploration.learn(trial, sum(seconds), seconds if trial.by_launch else ())
        if fresh:
            known = self.exploration.launches.seconds
            self.pool.post({key: known[key][-1] / self.exploration.baseline_seconds for key in fresh})

    def explore(self, calls: int = 200) -> None:
        for _ in range(calls):
            if self.exploration.settled is None:
                self.compute(self.next())

    @property
    def found(self) -> str:
        settled = self.exploration.settled
        assert settled is not None and settled.division is not None
        return settled.division.options[0].algorithm


@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_each_tries_others_and_all_come_to_the_best(slow: float) -> None:
    alone = Process(Shared())
    alone.explore()
    board = Shared()
    both = Process(board), Process(board, slow)
    for _ in range(200):
        asked = [process.next() if process.exploration.settled is None else None for process in both]
        for process, trial in zip(both, asked, strict=True):
            process.compute(trial)
    assert {process.found for process in both} == {alone.found} == {"gemm"}
    own = [{key for key in process.tried if key[1] != "stock"} for process in both]
    assert own[0] and own[1] and not own[0] & own[1], "none of them was tried twice"
    known = [
        {key: seconds for key, seconds in process.exploration.launches.seconds.items() if key[1] != "stock"}
        for process in both
    ]
    assert known[0].keys() == known[1].keys()
    for key in known[0]:
        assert known[1][key][0] == pytest.approx(slow * known[0][key][0]), "times are scaled to this process"


def test_who_comes_late_tries_nothing_again() -> None:
    board = Shared()
    first, late = Process(board), Process(board)
    first.explore()
    late.explore()
    assert late.found == first.found and late.tried == []


def test_what_fails_elsewhere_is_tried_here() -> None:
    board = Shared()
    first, second = Process(board), Process(board)
    first.failing = "gemm"
    first.explore()
    assert first.found == "fft"
    second.explore()
    assert second.found == "gemm"


def test_what_another_process_never_tells_is_tried_here_in_the_end() -> None:
    board = Shared()
    gone, here = Process(board), Process(board)
    claimed = gone.next()
    assert claimed is not None and claimed.division is not None
    fresh = gone.exploration.fresh(claimed)
    here.explore(PATIENCE // 2)
    assert here.exploration.settled is None
    assert not set(fresh) <= set(here.tried)
    here.explore()
    assert set(fresh) <= set(here.exploration.launches.seconds) and here.found == "gemm"
