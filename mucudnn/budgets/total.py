"""Divides a total of workspace among kernels (WD), and counts the bytes in use at this moment."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mucudnn.optimizer import Division, share
from mucudnn.process import in_child, renewed

MOST_KERNELS = 4096
"""The most kernels that can have a share; further ones get no workspace. A program whose weights are new at every call
makes a new kernel every time."""


STALE = 1000
"""A kernel gives its share back when it was not called during the last so many calls of all kernels, or during ten
times as many calls as there are kernels, whichever is more."""


@dataclass(eq=False)
class LayerKernel:
    """One convolution of one layer in one direction."""

    menu: Sequence[Division]
    """Desirable divisions that it can choose from, the one without workspace among them; shared by kernels of one
    shape, and changed when one turns out to be worse than expected."""
    division: Division | None = None  # What it has; `None`, no workspace, until the total is divided with it.
    share: int = 0  # Its bytes, those of its division.
    last_call: int = 0  # The number of its last call, all kernels' calls being counted.


class Shares:
    """The total among the kernels: at every moment the workspaces of their divisions add up to it at most.

    A new kernel has nothing at first. When a kernel is called again that was called since the first new one, the
    program has begun its next step: the set of kernels is known, and the total is divided anew.
    """

    def __init__(self, total: float) -> None:
        self.total = total  # Bytes; `math.inf` for no limit.
        self.kernels: dict[Hashable, LayerKernel] = {}  # By name, in the order of their first calls.
        self._calls = 0
        self._changed_at: int | None = None

    def call(self, name: Hashable, menu: Sequence[Division]) -> LayerKernel | None:
        """Notes a call of the kernel `name`, and returns its share; `None` if there are too many kernels."""
        self._calls += 1
        if self._calls % STALE == 0:
            self._forget()
        kernel = self.kernels.get(name)
        if kernel is None:
            if len(self.kernels) >= MOST_KERNELS:
                return None
            kernel = self.kernels[name] = LayerKernel(menu)
            self.change()
        elif self._changed_at is not None and kernel.last_call >= self._changed_at:
            self._divide()
        kernel.last_call = self._calls
        return kernel

    def change(self) -> None:
        """Divides the total anew at the next call, because a kernel is new or a menu has changed."""
        if self._changed_at is None:
            self._changed_at = self._calls

    def _divide(self) -> None:
        self._changed_at = None
        kernels = list(self.kernels.values())
        chosen = share([kernel.menu for kernel in kernels], self.total)
        for kernel, division in zip(kernels, chosen, strict=True):
            kernel.division, kernel.share = division, division.workspace

    def _forget(self) -> None:
        oldest = self._calls - max(STALE, 10 * len(self.kernels))
        called = {name: kernel for name, kernel in self.kernels.items() if kernel.last_call >= oldest}
        if len(called) < len(self.kernels):
            self.kernels = called
            self.change()


class ByteLedger:
    """Bytes in use by launches of all threads at this moment."""

    def __init__(self, total: float) -> None:
        self.total = total  # Bytes that may be in use at once; `math.inf` for no limit.
        self._taken = 0
        self._closed = False
        self._changed = renewed(threading.Condition())
        in_child(self._leave_to_parent)

    def take(self, size: int) -> bool:
        """Takes `size` bytes if so many are free; never waits."""
        with self._changed:
            if self._closed or self._taken + size > self.total:
                return False
            self._taken += size
            return True

    def give(self, size: int) -> None:
        """Gives back what was taken."""
        with self._changed:
            self._taken -= size
            self._changed.notify_all()

    def _leave_to_parent(self) -> None:
        # The threads that use bytes have stayed there.
        self._taken, self._closed = 0, False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until nothing is in use, then takes everything: for measuring, which uses as much as it may."""
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._closed = True
            while self._taken:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()
