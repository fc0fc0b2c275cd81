"""Keeps the plans of convolutions that no other process computes on the same data apart from shared plans.

Processes that compute the same must round in the same way, or their replicas drift apart. So they may only use plans on
which all have agreed. A process may compute its own part of the data by any division at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from mucudnn.convolution.call import Call
from mucudnn.devices import device_of
from mucudnn.reporting.record import Record
from mucudnn.runtime.decision import Decision
from mucudnn.runtime.fixed_limit import FixedLimit


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


_UNKNOWN: Any = object()


class LocalOrShared:
    """The convolutions of one shape and direction in a job of several ranks.

    A rank may plan its local work by itself: by trials in its own calls, or within a budget of its own memory. For a
    convolution that several ranks compute on the same data, all use one shared plan, so that they round in the same
    way.
    """

    rest = 0

    def __init__(
        self, local: Decision, share: Callable[[Call], FixedLimit | None], planning: AbstractContextManager[object]
    ) -> None:
        """
        Args:
            local: computes this rank's local work.
            share: finds the plan for a call on which all ranks agree; `None` where torch's own kernel computes it.
            planning: the lock of the thread that plans.
        """
        self._local, self._share = local, share
        self._shared: FixedLimit | None = _UNKNOWN
        self._planning = planning

    def run(self, call: Call) -> torch.Tensor | None:
        """The call's result; `None` where torch's own kernel is to compute it."""
        if is_local_work():
            return self._local.run(call)
        if self._shared is _UNKNOWN and device_of(call.input.device).is_capturing():
            return None  # nothing can be measured while a CUDA graph is captured
        if self._shared is _UNKNOWN:
            with self._planning:
                if self._shared is _UNKNOWN:
                    self._shared = self._share(call)
        return None if self._shared is None else self._shared.run(call)

    def records(self) -> list[Record]:
        """The records of the local plans; the shared plans are recorded where they are made."""
        return self._local.records()
