"""Logbook: the times that are known under one environment, from the database and from other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mucudnn.convolution.problem import ConvProblem
from mucudnn.optimizer import Option
from mucudnn.timing.board import Alone, Board
from mucudnn.timing.database import Launches, Needs
from mucudnn.timing.environment import Environment
from mucudnn.timing.store import Store
from mucudnn.warning import warn

WRONG = {"wrong": True}
"""The terms under which a database keeps the algorithms whose results were wrong, with the faults."""


class Logbook:
    """Looks up, keeps and shares the times of one environment.

    Attributes:
        environment: under which the times were, or are, measured.
        board: where processes that run the same program post what they measure.
    """

    def __init__(self, environment: Environment, store: Store, board: Board | None = None) -> None:
        """
        Args:
            store: the database that keeps the times.
            board: of a process that has no others, if not given.
        """
        self.environment = environment
        self.board = board or Alone()
        self._store = store
        self._known: dict[ConvProblem, Launches] = {}

    def unshared(self) -> Logbook:
        """Another logbook on the same database, whose times other processes do not wait for."""
        return Logbook(self.environment, self._store)

    def key(self, problem: ConvProblem) -> dict[str, Any]:
        """What the times of a problem's launches depend on, as plain values, but for its number of samples."""
        return {**problem.launch_key(), **self.environment.launch_key()}

    def launches(self, problem: ConvProblem) -> Launches:
        """The known launches of a problem, for any number of samples, by algorithm and extent."""
        if problem not in self._known:
            self._known[problem] = self._store.launches(self.key(problem))
        return self._known[problem]

    def record(self, problem: ConvProblem, option: Option) -> None:
        """Keeps a launch."""
        self.launches(problem)[option.algorithm, option.extent] = option
        self._store.record(self.key(problem), [option])

    def needs(self, problem: ConvProblem) -> Needs:
        """The workspaces of launches that were tried, by name; `None` of those that are not served."""
        return self._store.needs(self.key(problem))

    def record_need(self, problem: ConvProblem, launch: str, workspace: int | None) -> None:
        """Keeps the workspace of a launch."""
        self._store.record_need(self.key(problem), launch, workspace)

    def seconds(self, problem: ConvProblem, name: str, workspace: int, measure: Callable[[], float]) -> float:
        """Seconds of work on the whole of a problem: from the database, else measured by one of the processes.

        All processes that share the board get the same number.

        Args:
            name: of the work; it is kept as a launch of this name.
            workspace: bytes that it uses.
        """
        known = self.launches(problem).get((name, problem.extent))
        key = {**self.key(problem), "extent": problem.extent, "work": name}
        seconds = self.board.once(key, measure if known is None else lambda: known.seconds)
        if known is None or known.seconds != seconds:
            self.record(problem, Option(problem.extent, name, seconds, workspace))
        return seconds

    def faults(self, problem: ConvProblem, name: str, judge: Callable[[], dict[str, str] | None]) -> dict[str, str]:
        """What is wrong with the results of work on a problem, by algorithm; empty where all is right.

        It is on record, or judged by one of the processes that share the board, which then all get the same.

        Args:
            name: of the work.
            judge: `None` where nothing can be told.
        """
        known = self.settlement(problem, {"checked": name})
        key = {**self.key(problem), "extent": problem.extent, "work": f"check {name}"}
        faults: dict[str, str] | None = self.board.once(key, judge if known is None else lambda: known)
        if faults is not None and known is None:
            self.keep_faults(problem, name, faults)
        return faults or {}

    def keep_faults(self, problem: ConvProblem, name: str, faults: Mapping[str, str]) -> None:
        """Keeps the faults of the results of work, and reports them."""
        self.settle(problem, {"checked": name}, dict(faults))
        known = self.wrong(problem)
        for algorithm, fault in faults.items():
            if algorithm not in known:
                warn(f"{problem.direction} of {problem}: {algorithm} computed {fault}")
        if faults:
            self._store.settle(self.key(problem), WRONG, {**faults, **known})

    def wrong(self, problem: ConvProblem) -> dict[str, str]:
        """The algorithms whose results were wrong for a problem, for any number of samples, and what was wrong."""
        return self._store.settlement(self.key(problem), WRONG) or {}

    def settlement(self, problem: ConvProblem, terms: Mapping[str, Any]) -> Any:
        """The result of live planning for a problem under these terms, in plain values; `None` if there is none."""
        return self._store.settlement(self.key(problem), {"extent": problem.extent, **terms})

    def settle(self, problem: ConvProblem, terms: Mapping[str, Any], plan: Any) -> None:
        """Keeps the result of live planning."""
        self._store.settle(self.key(problem), {"extent": problem.extent, **terms}, plan)
