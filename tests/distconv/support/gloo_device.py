"""One network device for all groups over Gloo in a process.

The thread of a device wakes up a hundred times a second, and torch keeps groups for good. Each group otherwise has a
device of its own, and those of hundreds of tests would take half a core.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo  # type: ignore[attr-defined]


def share_a_device() -> None:
    """From now on groups that torch makes in this process share one device, on the loopback interface."""
    device, made = ProcessGroupGloo.create_device(interface="lo"), ProcessGroupGloo.__init__

    def make(group: Any, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        made(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = make
