"""Own work: the convolutions of which it is known that no other process computes the same.

Processes that compute the same must round alike, or what they hold drifts apart. So they may only use plans on which
all have agreed. What a process computes of its own part of the data may be computed by any division at any time.
"""

from __future__ import annotations

import threading
from types import TracebackType


class _Mark(threading.local):
    is_own = False


_mark = _Mark()


def is_own_work() -> bool:
    """Whether this thread's convolutions are marked as this process's own."""
    return _mark.is_own


class OwnWork:
    """A context in which the thread's convolutions are this process's own."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, _mark.is_own = _mark.is_own, True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _mark.is_own = self._before
