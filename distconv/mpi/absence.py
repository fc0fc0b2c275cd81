"""Notices ranks that have ended, for which the others would wait forever: MPI itself does not report them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch.distributed as dist

WAIT_SECONDS = 5.0  # how long an operation may still take after one of its ranks has ended
_LOOK_SECONDS = 1.0

_ended: list[Callable[[], Collection[int]]] = []


def ask_for_ended(ended: Callable[[], Collection[int]]) -> None:
    """Makes `ended` report the ranks of the job that have ended, from now on."""
    _ended[:] = [ended]


class AbsentRanks:
    """Watches over one operation that takes long."""

    def __init__(self, members: Collection[int]) -> None:
        self._members = members
        self._since: float | None = None
        self._look_at = time.monotonic() + _LOOK_SECONDS

    def check(self, now: float) -> None:
        """DistBackendError if one of the members ended WAIT_SECONDS ago or earlier; `now` is time.monotonic()."""
        if not _ended or now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        gone = sorted(set(self._members).intersection(_ended[0]()))
        if not gone:
            return
        self._since = self._since or now
        if now - self._since > WAIT_SECONDS:
            raise dist.DistBackendError(f"an MPI operation waits for rank {gone[0]}, which has ended")
