"""Processes that share what they measure: every piece once, and the same plan for all. Threads stand in for them."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.convolution.problem import ConvProblem, Dim, Direction
from mucudnn.optimizer import Option
from mucudnn.planning.plan import Plan
from mucudnn.planning.planner import Planner
from mucudnn.settings import Settings
from mucudnn.timing.board import Board
from mucudnn.timing.environment import Environment
from mucudnn.timing.logbook import Logbook
from mucudnn.timing.measurement import Measurement
from mucudnn.timing.store import Store
from mucudnn.timing.survey import Survey

PROBLEM = ConvProblem.of_convolution(
    Direction.FORWARD, (8, 4, 48, 48), (4, 4, 15, 15), stride=(1, 1), padding=(7, 7), dilation=(1, 1)
)
ENVIRONMENT = Environment("test", threads=1, deterministic=False, precision="", libraries="")


class Shared(Board):
    """A board in memory.

    Attributes:
        posts: how often each name was posted.
    """

    def __init__(self, patience: float = 30.0) -> None:
        self.patience = patience
        self.posts: dict[str, int] = {}
        self._texts: dict[str, str] = {}
        self._claimed: set[str] = set()
        self._changed = threading.Condition()

    def claim(self, name: str) -> bool:
        with self._changed:
            first = name not in self._claimed
            self._claimed.add(name)
            return first

    def post(self, name: str, text: str) -> None:
        with self._changed:
            self.posts[name] = self.posts.get(name, 0) + 1
            self._texts[name] = text
            self._changed.notify_all()

    def look(self, name: str) -> str | None:
        return self._texts.get(name)

    def read(self, name: str) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: name in self._texts, self.patience)
            return self._texts.get(name)


def planned(board: Board, policy: str = "powerOfTwo") -> Plan:
    settings = Settings.from_environment({}, policy=policy, database=":memory:", progress="off")
    planner = Planner(settings, Store(":memory:"), board=board)
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
    own = Measurement(PROBLEM, Logbook(ENVIRONMENT, store))
    own_seconds = own.stock_seconds()
    first = Measurement(PROBLEM, Logbook(ENVIRONMENT, Store(":memory:"), board)).stock_seconds()
    assert Measurement(PROBLEM, Logbook(ENVIRONMENT, store, board)).stock_seconds() == first != own_seconds
    assert Measurement(PROBLEM, Logbook(ENVIRONMENT, store)).stock_seconds() == first


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("processes", [1, 3])
def test_a_survey_does_every_task_once(workers: int, processes: int) -> None:
    board = Shared()
    tasks = [(Dim.BATCH, f"algorithm {number}") for number in range(20)]
    done: list[str] = []

    def worker(dim: Dim, name: str) -> list[Option]:
        done.append(name)
        number = int(name.split()[1])
        return [Option(size, name, 1.0 + number, size * number) for size in (1, 2)]

    def process(_: int) -> list[list[Option]]:
        measurement = Measurement(PROBLEM, Logbook(ENVIRONMENT, Store(":memory:"), board))
        advanced = itertools.count()
        found = Survey(measurement, tasks, {}).by([worker] * workers, lambda: next(advanced))
        assert next(advanced) == len(tasks)
        return found

    with ThreadPoolExecutor(processes) as pool:
        results = list(pool.map(process, range(processes)))
    assert sorted(done) == sorted(name for _, name in tasks)
    assert all(result == results[0] for result in results)
    assert [options[0].algorithm for options in results[0]] == [name for _, name in tasks]


def test_a_failure_is_posted_and_the_others_measure_themselves(caplog: pytest.LogCaptureFixture) -> None:
    board, key = Shared(), {"work": "stock"}

    def fail() -> float:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        board.once(key, fail)
    assert board.once(key, lambda: 2.0) == 2.0
    assert "did not post" in caplog.text
    silent = Shared(patience=0.01)
    silent.claim("another process's")
    assert silent.given({"work": "x"}, lambda: 3.0) == 3.0


@given(st.one_of(st.floats(0, 1e9), st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False)))))
def test_numbers_arrive_to_the_bit(value: object) -> None:
    board = Shared()
    assert board.once({"work": 1}, lambda: value) == value
    assert board.once({"work": 1}, lambda: None) == value
