"""Own or alike: convolutions of one shape that a process computes alone, or as other processes do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from mucudnn.convolution.call import Call
from mucudnn.devices import device_of
from mucudnn.reporting.record import Record
from mucudnn.runtime.decision import Decision
from mucudnn.runtime.fixed_limit import FixedLimit
from mucudnn.runtime.own_work import is_own_work

_UNKNOWN: Any = object()


class OwnOrAlike:
    """The convolutions of one shape and direction on several ranks, where these may decide differently.

    They may for a rank's own work, as where that is explored on the rank's calls or has a budget of the rank's memory.
    What several ranks compute alike is computed by what all have agreed on.
    """

    def __init__(self, own: Decision, alike: Callable[[Call], FixedLimit | None]) -> None:
        """
        Args:
            own: what serves them for this rank alone.
            alike: the plan on which all ranks agree for a call; `None` where torch's own kernel computes it.
        """
        self._own, self._alike_by = own, alike
        self._alike: FixedLimit | None = _UNKNOWN
        self._lock = threading.Lock()

    def run(self, call: Call) -> torch.Tensor | None:
        """The call's result; `None` where torch's own kernel is to compute it."""
        if is_own_work():
            return self._own.run(call)
        if self._alike is _UNKNOWN and device_of(call.input.device).is_capturing():
            return None  # nothing can be measured in a CUDA graph's capture
        with self._lock:
            if self._alike is _UNKNOWN:
                self._alike = self._alike_by(call)
        return None if self._alike is None else self._alike.run(call)

    def records(self) -> list[Record]:
        """What is found for the rank's own work; the plans of the others are recorded where they are made."""
        return self._own.records()
