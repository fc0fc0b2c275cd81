"""Marks local work: convolutions that no other process computes on the same data.

Processes that compute the same must round in the same way, or their replicas drift apart. So they may only use plans on
which all have agreed. A process may compute its own part of the data by any division at any time.
"""

from __future__ import annotations

import threading
from types import TracebackType


class _Mark(threading.local):
    is_own = False


_mark = _Mark()


def is_local_work() -> bool:
    """Whether this thread's convolutions are marked as local work."""
    return _mark.is_own


class LocalWork:
    """A context that marks the thread's convolutions as local work."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, _mark.is_own = _mark.is_own, True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _mark.is_own = self._before
