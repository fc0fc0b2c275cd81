"""Live total: convolutions of one shape are explored within the whole total, and get a share of it afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch

from mucudnn.convolution.call import Call
from mucudnn.planning.plan import Plan
from mucudnn.reporting.record import Record
from mucudnn.runtime.live import Live
from mucudnn.runtime.shared_total import SharedTotal, Workspace


class LiveTotal:
    """The convolutions of one shape and direction under a total, where planning is live.

    The division of a layer depends on the gains of all others, so no layer holds a share before its launches are known.
    Until then a trial may use all of the total that no other call uses at that moment.
    """

    def __init__(self, workspace: Workspace, live: Live, limit: float, shared: Callable[[Plan], SharedTotal]) -> None:
        """
        Args:
            live: explores the convolutions within the limit.
            limit: bytes that one convolution may use, the total at most.
            shared: returns what computes them from then on, given the settled plan.
        """
        self._workspace, self._live, self._shared_by = workspace, live, shared
        self._limit = int(min(limit, sys.maxsize))
        self._shared: SharedTotal | None = None
        self._lock = threading.Lock()

    def run(self, call: Call) -> torch.Tensor | None:
        """The call's result; `None` where torch's own kernel is to compute it."""
        shared = self._shared or self._begin()
        if shared is not None:
            return shared.run(call)
        if self._live.is_left or not self._workspace.ledger.take(self._limit):
            return None
        try:
            return self._live.run(call)
        finally:
            self._workspace.ledger.give(self._limit)

    def records(self) -> list[Record]:
        """A record for each kernel, or the records of the exploration."""
        return self._live.records() if self._shared is None else self._shared.records()

    def _begin(self) -> SharedTotal | None:
        """What computes the convolutions once their gains are known."""
        with self._lock:
            plan = self._live.plan
            if self._shared is None and plan is not None and not plan.is_stock:
                self._shared = self._shared_by(plan)
            return self._shared
