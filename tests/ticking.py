"""A thread that counts as long as other threads of Python may run."""

from __future__ import annotations

import contextlib
import threading
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
