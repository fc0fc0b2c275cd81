"""Recent: a dict of bounded size that drops its oldest entries, for decisions about shapes that may never recur."""

from __future__ import annotations

import contextlib
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A dict that forgets what was put in first when it has more than so many entries.

    Reading costs what it costs in any dict: nothing is noted of it, as an LRU cache would. Entries are put in by
    ``recent[key] = value`` alone; threads may do so at once, and then read with ``get``.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most  # Entries.

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self.most:
            with contextlib.suppress(KeyError, RuntimeError):  # another thread does the same
                del self[next(iter(self))]
