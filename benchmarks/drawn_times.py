"""Times that are drawn instead of measured, so that every division of a convolution comes about."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest import mock

from mucudnn.optimizer import Launches, Trial
from mucudnn.planning.experience import Experience
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.timing import clock

STOCK_SECONDS = 0.02


@contextlib.contextmanager
def drawn_times(seed: int) -> Iterator[None]:
    """Within it, mucudnn's clock tells times that a seed gives, whatever is fast on this machine.

    What is timed still runs, so that what fails is known to. Torch's own kernel on the whole is always the slowest, and
    nothing is left out for what similar launches took.
    """
    random = Random(seed)
    launches: weakref.WeakSet[Any] = weakref.WeakSet()  # works hold the tensors that they compute with

    def first_seconds(work: Any, *_: Any) -> float:
        launches.add(work)
        work()
        return 0.0

    def again_seconds(work: Any, *_: Any) -> float:
        work()
        return float(10 ** random.uniform(-7, -2)) if work in launches else STOCK_SECONDS

    def laps(runner: TrialRunner, trial: Trial, given: Any) -> list[float]:
        runner.run(trial, given)
        return [STOCK_SECONDS * (1.0 if trial.division is None else random.uniform(0.3, 0.99))]

    times = {"seconds": again_seconds, "again_seconds": again_seconds, "first_seconds": first_seconds}
    with (
        mock.patch.multiple(clock, **times),
        mock.patch.object(TrialRunner, "laps", laps),
        mock.patch.object(Experience, "forecast", lambda *_: None),
        mock.patch.object(Launches, "_lower_bound", lambda *_: 0.0),
    ):
        yield
