"""Threads that count, or take the time, as long as other threads of Python may run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def ticking() -> Iterator[Callable[[], int]]:
    """A context in which a thread counts once a millisecond; given is what tells its count."""
    ticks, is_over = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not is_over.wait(1e-3):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield lambda: ticks
    finally:
        is_over.set()
        thread.join()


def longest_wait(work: Callable[[], object]) -> float:
    """The most seconds for which another thread that sleeps a millisecond each time does not run during the work."""
    longest, runs, is_over = 0.0, threading.Event(), threading.Event()

    def wait() -> None:
        nonlocal longest
        last = time.perf_counter()
        runs.set()
        while not is_over.is_set():
            time.sleep(1e-3)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=wait)
    thread.start()
    runs.wait()
    try:
        work()
    finally:
        is_over.set()
        thread.join()
    return longest
