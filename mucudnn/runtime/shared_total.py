"""Keeps the workspaces of all convolutions together within a total (workspace division, WD)."""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from mucudnn.budgets.total import ByteLedger, Shares
from mucudnn.convolution.call import Call
from mucudnn.optimizer import Division
from mucudnn.planning.plan import Plan
from mucudnn.process import renewed
from mucudnn.reporting.record import Record
from mucudnn.runtime.decision import ByBytes, Decide, Decision


class Workspace:
    """The total of a session: the shares of kernels, and the bytes that are in use now."""

    def __init__(self, total: float, planning: AbstractContextManager[object]) -> None:
        """With the lock of the thread that plans."""
        self.planning, self.lock = planning, renewed(threading.Lock())
        self.shares, self.ledger = Shares(total), ByteLedger(total)


class Layers:
    """The numbers of the layers of one shape, known by the memory of their weights.

    Some weights are new at every step: copies in another type under autocast, or weights that a layer computes. Where
    the memory of a weight is gone, its number goes to the next weight that is not known yet. So there are no more
    numbers than there were weights at once.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def number(self, weight: torch.Tensor) -> int:
        """The number of a weight's layer; one thread at a time."""
        address = weight.data_ptr()
        if address in self._known:
            number, storage = self._known[address]
            if storage() is not None:
                return number
        else:
            gone = ((number, old) for old, (number, storage) in self._known.items() if storage() is None)
            number, old = min(gone, default=(len(self._known), address))
            self._known.pop(old, None)
        self._known[address] = number, weakref.ref(weight.untyped_storage())
        return number


class SharedTotal(ByBytes):
    """The kernels of one shape and direction: one per layer.

    Their launches are measured once for all of them, before the first call or, where planning is live, by calls that
    may use all of the total that no other call uses at that moment: the division of a layer depends on the gains of all
    others, so none has a share before its launches are known. From then on each kernel runs the division that its
    share allows. When a kernel has a share for the first time, the best divisions within it are timed as wholes against
    torch's own kernel, and the kernel runs the one that wins, whatever of its share that needs: to divide the rest anew
    would go on for several steps, each with further trials. Only if none wins, others get the shares of the shape.
    """

    def __init__(self, workspace: Workspace, whole: Decision, limit: float, decide: Decide) -> None:
        """
        Args:
            whole: the best within the limit, measured or explored.
            limit: bytes that one convolution may use, the total at most.
        """
        super().__init__(workspace.planning, decide)
        self._workspace, self._whole = workspace, whole
        self._limit = int(min(limit, sys.maxsize))
        self._stock: Plan | None = None  # torch's own kernel as the plan, once all launches beside it are known
        self._menu: list[Division] = []
        self._layers = Layers()
        self._lock = renewed(threading.Lock())
        self._begin()

    def run(self, call: Call) -> torch.Tensor | None:
        stock = self._stock or self._begin()
        if stock is None:
            result = self._run(self._whole, self._limit, call)
            self.is_left = self._whole.latest.is_left
            return result
        with self._workspace.lock:
            kernel = self._workspace.shares.call((self, self._layers.number(call.weight)), self._menu)
            if kernel is None or kernel.division is None or kernel.division == stock.division:
                return None
            share = kernel.share
        within = self.within(share, call)
        if within is None:
            self._give_back()
            return None
        return self._run(within, share, call)

    def _begin(self) -> Plan | None:
        """Puts the divisions on the menu once their launches are timed. Returns torch's own kernel as a plan then."""
        with self._lock:
            self._whole = self._whole.latest
            plan = self._whole.plan
            if self._stock is None and plan is not None and not plan.is_stock:
                stock = plan.undivided()
                self._menu += stock.desirable()
                self._stock = stock
            return self._stock

    def _run(self, chosen: Decision, size: int, call: Call) -> torch.Tensor | None:
        """The call's result, if so many bytes are there now and torch's own kernel is not what was chosen."""
        if chosen.is_left or not self._workspace.ledger.take(size):
            return None
        try:
            return chosen.run(call)
        finally:
            self._workspace.ledger.give(size)

    def records(self) -> list[Record]:
        """A record for each kernel, its share as the limit; before there are shares, those of the whole limit."""
        stock = self._stock
        if stock is None:
            return self._whole.latest.records()
        with self._workspace.lock:
            kernels = [kernel for kernel in self._workspace.shares.kernels.values() if kernel.menu is self._menu]
            return [self._record(kernel.division or stock.division, kernel.share, stock) for kernel in kernels]

    def _record(self, division: Division, share: int, stock: Plan) -> Record:
        within = self.made.get(share)
        if within is None and share in self.made:
            return replace(stock.record, limit=share)
        if within is None or within.latest.plan is None:  # as the times of its launches promise
            return replace(stock.divided(division).record, limit=share)
        (record,) = within.latest.records()
        return record

    def _give_back(self) -> None:
        """Leaves all kernels of the shape to torch's own: within the share of one of them, no division was faster."""
        with self._workspace.lock:
            if len(self._menu) > 1:
                del self._menu[1:]
                self._workspace.shares.change()
