"""Writes launches to the database in a thread of its own, at most once a second, so that no call of a program waits."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping

from mucudnn.process.at_fork import in_child, renewed
from mucudnn.timing.database import Launches

PERIOD = 1.0
"""Seconds from a launch that is added to the next writing: a program that is killed loses what was noted in between."""


class DeferredWrites:
    """Launches by the text of their key, until they are written."""

    def __init__(self, write: Callable[[str, Launches], None]) -> None:
        """``write``: writes the launches of one key, waiting as long as that takes."""
        self._write = write
        self._lock, self._writing = renewed(threading.Lock()), renewed(threading.Lock())
        self._leave_to_parent()
        in_child(self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        self._rows: dict[str, Launches] = {}
        self._timer: threading.Timer | None = None

    def add(self, text: str, launches: Launches) -> None:
        """Adds launches of a key; returns at once."""
        with self._lock:
            self._rows[text] = self._rows.get(text, {}) | launches
            if self._timer is None:
                self._timer = threading.Timer(PERIOD, self.flush)
                self._timer.daemon = True
                self._timer.start()
                atexit.register(self.flush)

    def rows(self) -> Mapping[str, Launches]:
        """The launches that are not written yet."""
        with self._lock:
            return dict(self._rows)

    def flush(self) -> None:
        """Writes everything now."""
        with self._writing:
            with self._lock:
                timer, self._timer = self._timer, None
                rows = dict(self._rows)
            if timer is not None:
                timer.cancel()
                atexit.unregister(self.flush)
            for text, launches in rows.items():
                self._write(text, launches)
                with self._lock:  # not before it is on the file, where readers look next; what was noted since stays
                    left = self._rows.get(text, {})
                    left = {name: option for name, option in left.items() if launches.get(name) != option}
                    if left:
                        self._rows[text] = left
                    else:
                        self._rows.pop(text, None)
