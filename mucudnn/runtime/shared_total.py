"""Shared total: the workspaces of all convolutions together stay within a total (WD)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mucudnn.budgets.total import Ledger, Menu, Shares
from mucudnn.convolution.call import Call
from mucudnn.optimizer import Division
from mucudnn.planning.plan import Plan
from mucudnn.recent import Recent
from mucudnn.reporting.record import Record
from mucudnn.runtime.fixed_limit import FixedLimit
from mucudnn.runtime.live import Live

MOST_SHARES = 256
"""The most shares of one convolution whose plans are kept."""

_UNKNOWN: Any = object()


class Workspace:
    """The total of a session: the shares of kernels, and the bytes that are in use now."""

    def __init__(self, total: float) -> None:
        self.shares = Shares(total)
        self.ledger = Ledger(total)
        self.lock = threading.Lock()


class SharedTotal:
    """The kernels of one shape and direction: one per weight, so one per layer.

    Their launches have been measured once for all of them. Each kernel runs the division that its share allows. When a
    kernel is to run a division for the first time, the division as a whole is timed against torch's own kernel, and is
    taken off the menu if it is not faster.
    """

    def __init__(
        self, workspace: Workspace, stock: Plan, confirm: Callable[[Call, int], FixedLimit | Live | None]
    ) -> None:
        """
        Args:
            stock: torch's own kernel as the plan, with all options that were measured.
            confirm: what computes a call within so many bytes, measured as a whole or exploring that; `None` where that
                cannot be.
        """
        self._workspace, self._stock, self._confirm = workspace, stock, confirm
        self._menu = Menu(stock.desirable())
        # By share; `None` where torch's own kernel serves.
        self._within: Recent[int, FixedLimit | Live | None] = Recent(MOST_SHARES)
        self._confirmed: Recent[int, FixedLimit | Live | None] = Recent(MOST_SHARES)  # of which the best is known
        self._found: Recent[Division, Plan] = Recent(MOST_SHARES)  # what came on the menu later
        self._lock = threading.Lock()

    def run(self, call: Call) -> torch.Tensor | None:
        """The call's result; `None` where torch's own kernel is to compute it."""
        with self._workspace.lock:
            kernel = self._workspace.shares.call((self, call.weight.data_ptr()), self._menu)
            if kernel is None or kernel.division is None or kernel.division == self._stock.division:
                return None
            division, share = kernel.division, kernel.share
        within = self._confirmed.get(share, _UNKNOWN)
        if within is _UNKNOWN:
            within = self._confirm_within(division, share, call)
        if within is None or within.is_left or not self._workspace.ledger.take(share):
            return None
        try:
            return within.run(call)
        finally:
            self._workspace.ledger.give(share)

    def records(self) -> list[Record]:
        """A record for each kernel, its share as the limit."""
        with self._workspace.lock:
            kernels = [kernel for kernel in self._workspace.shares.kernels.values() if kernel.menu is self._menu]
            return [self._record(kernel.division or self._stock.division, kernel.share) for kernel in kernels]

    def _record(self, division: Division, share: int) -> Record:
        within = self._within.get(share)
        return replace(self._plan(division, share).record, calls=0 if within is None else within.calls)

    def _plan(self, division: Division, share: int) -> Plan:
        """The plan within a share, or the one expected by the times of its launches."""
        within = self._within.get(share)
        if within is not None and within.plan is not None:
            return within.plan
        if division in self._found:
            return replace(self._found[division], limit=share)
        return self._stock.taking(division, share)

    def _confirm_within(self, division: Division, share: int, call: Call) -> FixedLimit | Live | None:
        with self._lock:
            if share not in self._within:
                self._within[share] = self._confirm(call, share)
            within = self._within[share]
            plan = self._stock if within is None or (within.plan is None and within.is_left) else within.plan
            if plan is not None:
                if plan.division != division:
                    self._disappoint(share, plan)
                self._confirmed[share] = within
            return within

    def _disappoint(self, share: int, best: Plan) -> None:
        """Removes the divisions within a share that were expected to be faster than the best one found there."""
        with self._workspace.lock:
            self._found[best.division] = best
            others = [d for d in self._menu.divisions if d.workspace > share or d.seconds >= best.seconds]
            self._menu.divisions = [best.division, *(other for other in others if other != best.division)]
            self._workspace.shares.change()
