"""Ledger: the workspace that is in use now, never more than there is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Ledger:
    """Bytes that launches of all threads hold at this moment.

    Attributes:
        total: bytes that may be held at once; `math.inf` for no limit.
    """

    def __init__(self, total: float) -> None:
        self.total = total
        self._held = 0
        self._closed = False
        self._changed = threading.Condition()

    def take(self, size: int) -> bool:
        """Holds `size` bytes if they are there; never waits."""
        with self._changed:
            if self._closed or self._held + size > self.total:
                return False
            self._held += size
            return True

    def give(self, size: int) -> None:
        """Gives back what was taken."""
        with self._changed:
            self._held -= size
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until nothing is held, then holds everything: for measuring, which uses as much as it may."""
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._closed = True
            while self._held:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()
