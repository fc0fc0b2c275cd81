"""A machine whose launches take made-up seconds, for tests of what the planner measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.convolution.tile import Part
from mucudnn.optimizer import Trial
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers import Provider
from mucudnn.timing import clock

STOCK_SECONDS = 1.0
ROWS = 8


def problem(extent: int, channels: int = 2, kernel: int = 3) -> ConvProblem:
    shapes = (extent, channels, ROWS, ROWS), (3, channels, kernel, kernel)
    padding = kernel // 2, kernel // 2
    return ConvProblem.of_convolution(Direction.FORWARD, *shapes, stride=(1, 1), padding=padding, dilation=(1, 1))


class Machine(Provider):
    """A provider whose launches take the seconds and the workspace it was given, on a clock of its own.

    It serves no micro-tiles.

    Attributes:
        launches: algorithm and extents of every launch so far.
        ratio: what a division takes in units of torch's own kernel.
        failing: algorithm and least extent that fail.
    """

    def __init__(self, seconds: dict[str, Callable[[int], float]], workspace: Callable[[int], int]) -> None:
        self.seconds, self.bytes = seconds, workspace
        self.launches: list[tuple[str, tuple[int, ...]]] = []
        self.ratio = 0.5
        self.failing: dict[str, int] = {}
        self.now = 0.0

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        return list(self.seconds) if problem.y_shape[2] == ROWS else []

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        return self.bytes(problem.extent)

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        extents = [part.problem.extent for part in parts]
        self.launches.append((algorithm, tuple(extents)))
        if max(extents) >= self.failing.get(algorithm, math.inf):
            raise RuntimeError("no memory\nand a long explanation")
        self.now += sum(self.seconds[algorithm](extent) for extent in extents)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def elapsed(work: clock.Work, *others: object, **named: object) -> float:
            start = self.now
            work()
            return (self.now - start) or STOCK_SECONDS  # only torch's own kernel does not move this clock

        def laps(runner: TrialRunner, trial: Trial, given: Operands) -> list[float]:
            runner.run(trial, given)
            return [STOCK_SECONDS * (1.0 if trial.division is None else self.ratio)]

        for name in ("first_seconds", "again_seconds", "seconds"):
            monkeypatch.setattr(clock, name, elapsed)
        monkeypatch.setattr(TrialRunner, "laps", laps)
