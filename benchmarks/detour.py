"""What the shim adds to a call that it leaves to torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from mucudnn.runtime import shim
from mucudnn.runtime.session import Session
from mucudnn.settings import Settings

CALLS, ROUNDS = 2000, 15


def microseconds(work: Callable[[], object], calls: int) -> float:
    """Microseconds of a call, over many."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return 1e6 * (time.perf_counter() - start) / calls


def detour(work: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of a call with torch as it is and with the shim, in turn, medians."""
    session = Session(Settings.from_environment({}, database=":memory:"))
    times: dict[str, list[float]] = {"stock": [], "shim": []}
    for _ in range(ROUNDS):
        for name, arm in (("stock", None), ("shim", session)):
            shim.install(arm)
            microseconds(work, 100)
            times[name].append(microseconds(work, CALLS))
    shim.install(None)
    return statistics.median(times["stock"]), statistics.median(times["shim"])
