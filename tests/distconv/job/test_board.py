"""What ranks measure, shared between real processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import Ranks

from distconv.job.board import StoreBoard
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.planning.plan import Plan
from mucudnn.planning.planner import Planner
from mucudnn.settings import Settings
from mucudnn.timing.store import Store


class Counted(StoreBoard):
    """A board that remembers what this process has posted."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self.posted: list[str] = []

    def post(self, name: str, text: str) -> None:
        self.posted.append(name)
        super().post(name, text)


def planned(prefix: str, policy: str, late: int) -> tuple[list[Plan], list[str]]:
    """The plans of a convolution's three directions, with a database that only this rank has, and what it posted.

    Rank ``late`` comes when the others are done.
    """
    board = Counted(dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store()))
    settings = Settings.from_environment({}, policy=policy, database=":memory:", progress="off")
    planner = Planner(settings, Store(":memory:"), board=board)
    geometry = {"stride": (1, 1), "padding": (7, 7), "dilation": (1, 1)}
    problems = [
        ConvProblem.of_convolution(direction, (4, 4, 40, 40), (4, 4, 15, 15), **geometry) for direction in Direction
    ]
    if dist.get_rank() == late:
        dist.barrier()
    plans = [planner.plan(planner.measurement(problem)) for problem in problems]
    if dist.get_rank() != late:
        dist.barrier()
    return plans, board.posted


@pytest.mark.parametrize(("size", "policy"), [(2, "powerOfTwo"), (4, "undivided")])
def test_ranks_measure_every_launch_once_and_make_the_same_plans(
    ranks: Callable[[int], Ranks], size: int, policy: str
) -> None:
    answers = ranks(size).run(planned, f"{size} {policy}", policy, size - 1)
    assert all(plans == answers[0][0] for plans, _ in answers)
    posted = [name for _, names in answers for name in names]
    assert posted and len(set(posted)) == len(posted)
    assert not answers[-1][1]  # who comes late finds all there


class Failing(dist.Store):
    """A store that answers nothing: its connection is lost, or nobody posts within its timeout."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("connection lost")

    def get(self, key: str) -> bytes:
        raise dist.DistNetworkError("connection lost")


def test_a_lost_store_is_an_error_and_no_plan_of_its_own() -> None:
    with pytest.raises(dist.DistNetworkError):
        StoreBoard(Failing()).read("x")


def test_a_measurement_that_takes_longer_than_the_stores_patience_is_awaited() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    board = StoreBoard(store)
    assert board.claim("x")
    posting = threading.Timer(2.5, board.post, ("x", "text"))
    posting.start()
    assert board.read("x") == "text"
    posting.join()
