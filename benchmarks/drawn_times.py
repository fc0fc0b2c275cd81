"""Times that are drawn instead of measured, so that every division of a convolution comes about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest import mock

from mucudnn.timing import clock

STOCK_SECONDS = 0.02


@contextlib.contextmanager
def drawn_times(seed: int) -> Iterator[None]:
    """Within it, mucudnn's clock tells times that a seed gives, whatever is fast on this machine.

    What is timed still runs, so that what fails is known to. Torch's own kernel on the whole is always the slowest.
    """
    random = Random(seed)
    launches: list[Any] = []

    def first_seconds(work: Any, *_: Any) -> float:
        launches.append(work)
        work()
        return 0.0

    def seconds(work: Any, *_: Any) -> float:
        work()
        return float(10 ** random.uniform(-7, -2)) if work in launches else STOCK_SECONDS

    def ratio(work: Any, baseline: Any, *_: Any) -> float:
        work()
        return random.uniform(0.3, 0.99)

    with mock.patch.multiple(clock, seconds=seconds, first_seconds=first_seconds, ratio=ratio):
        yield
