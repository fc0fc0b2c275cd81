"""The progress bar of measuring."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[], object]


@contextmanager
def bar(total: int, description: str, mode: str = "auto") -> Iterator[Advance]:
    """A bar on stderr, gone when the work is done; calling what the context gives advances it by one.

    Bars may be nested and advanced from several threads.

    Args:
        total: steps until the work is done.
        description: what is being done.
        mode: `Settings.progress`: "auto" shows the bar where stderr is a terminal, "on" always, "off" never.
    """
    if mode == "off" or (mode == "auto" and not _on_terminal()):
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=description, file=sys.stderr, leave=False, dynamic_ncols=True) as shown:
        # tqdm counts without a lock of its own.
        lock = tqdm.get_lock()

        def advance() -> None:
            with lock:
                shown.update()

        yield advance


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
