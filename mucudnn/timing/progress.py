"""The progress bar for measuring and planning."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[], object]


@contextmanager
def bar(total: int | None, description: str, mode: str = "auto") -> Iterator[Advance]:
    """A bar on stderr, gone when the work is done; calling what the context gives advances it by one.

    Bars may be nested and advanced from several threads. The seconds that have passed are shown anew every second.

    Args:
        total: steps until the work is done; None where they are not known, and only the seconds are shown.
        description: what is being done.
        mode: `Settings.progress`: "auto" shows the bar where stderr is a terminal, "on" always, "off" never.
    """
    if mode == "off" or (mode == "auto" and (sys.stderr is None or not sys.stderr.isatty())):
        yield lambda: None
        return
    from tqdm import tqdm

    form = "{desc} {elapsed}" if total is None else None
    with tqdm(
        total=total, desc=description, file=sys.stderr, leave=False, dynamic_ncols=True, bar_format=form
    ) as shown:
        # tqdm counts without a lock of its own.
        lock, ended = tqdm.get_lock(), threading.Event()

        def advance() -> None:
            with lock:
                shown.update()

        def tick() -> None:
            while not ended.wait(1):
                shown.refresh()

        clock = threading.Thread(target=tick, daemon=True)
        clock.start()
        try:
            yield advance
        finally:
            ended.set()
            clock.join()
