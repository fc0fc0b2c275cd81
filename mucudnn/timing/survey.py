"""Survey: measures the launches of many algorithms on several devices at once, and shares them with other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mucudnn.convolution.problem import Dim
from mucudnn.optimizer import Option
from mucudnn.timing.board import name_of
from mucudnn.timing.measurement import Measurement

Task = tuple[Dim, str]
"""A dim and an algorithm."""

Worker = Callable[[Dim, str], list[Option]]
"""Measures one task where it is at home."""

_Plain = list[list[Any]]


class Survey:
    """The tasks of one problem. Each is done once, by whichever worker of whichever process is free first."""

    def __init__(self, measurement: Measurement, tasks: Sequence[Task], terms: Mapping[str, Any]) -> None:
        """
        Args:
            terms: what beside the problem decides which launches are measured.
        """
        self._measurement, self._tasks, self._board = measurement, tasks, measurement.logbook.board
        problem = measurement.problem
        key = {**measurement.logbook.key(problem), "extent": problem.extent, **terms}
        self._keys = [{**key, "work": f"{dim} {name}"} for dim, name in tasks]

    def by(self, workers: Sequence[Worker], advance: Callable[[], object]) -> list[list[Option]]:
        """The launches of every task, in the tasks' order.

        Args:
            workers: at least one; each runs in a thread of its own if there are several.
            advance: called after every task.
        """
        found: list[_Plain | None] = [None] * len(self._tasks)
        numbers, lock = iter(range(len(self._tasks))), threading.Lock()

        def work(worker: Worker) -> None:
            for number in _taken(numbers, lock):
                key = self._keys[number]
                if self._board.claim(name_of(key)):
                    found[number] = self._board.take(key, partial(_plain, worker, self._tasks[number]))
                    advance()

        if len(workers) == 1:
            work(workers[0])
        else:
            with ThreadPoolExecutor(len(workers)) as pool:
                list(pool.map(work, workers))
        for number, task in enumerate(self._tasks):
            if found[number] is None:
                given = self._board.given(self._keys[number], partial(_plain, workers[0], task))
                for row in given:
                    self._measurement.adopt(task[0], Option(*row))
                found[number] = given
                advance()
        return [[Option(*row) for row in rows or ()] for rows in found]


def _plain(worker: Worker, task: Task) -> _Plain:
    return [[option.extent, option.algorithm, option.seconds, option.workspace] for option in worker(*task)]


def _taken(numbers: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    """What is left of the numbers, each to one thread."""
    while True:
        with lock:
            number = next(numbers, None)
        if number is None:
            return
        yield number
