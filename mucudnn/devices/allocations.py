"""Counts the bytes of a device's tensors by torch's memory profiler.

It reports the bytes that are alive at every allocation and release of the thread that starts it. That is exact,
whatever operator or kernel allocates; nothing above a host's allocator could know it, and a GPU's counters of peaks are
the program's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mucudnn.devices.device import Work
from mucudnn.process import environment

_MARK = "mucudnn mark"

_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Texts of torch's errors when memory is used up; only its allocator for GPUs has a type of error."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an operation has failed because no memory was left, of a GPU or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _NO_MEMORY)


def can_profile() -> bool:
    """Whether a profile can be started now: not while the program has one of its own."""
    return not torch._C._autograd._profiler_enabled()


def started_profile() -> torch.autograd.profiler.profile:
    """A profile that has begun, without a word on stderr."""
    # torch.profiler's, and one that accumulates, would make megabytes of Python objects in cycles at their end.
    profile = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True)
    with environment(KINETO_LOG_LEVEL="99"):
        profile.__enter__()
    return profile


def leave_mark(place: torch.device) -> None:
    """Leaves an event that carries the total of the moment."""
    with torch.profiler.record_function(_MARK):
        torch.empty(1, dtype=torch.uint8, device=place)


def ended(profile: torch.autograd.profiler.profile, place: torch.device) -> list[tuple[int, bool]]:
    """Ends a profile: the bytes alive after every allocation and release there, in order, and whether it is a mark."""
    profile.__exit__(None, None, None)
    return list(_totals(profile.kineto_results.experimental_event_tree(), place))  # type: ignore[union-attr]


def peak_bytes(work: Work, place: torch.device) -> int:
    """Bytes that are alive at a place at once, at most, while work is done, beyond those before.

    Raises:
        RuntimeError: where the program has a profile of its own.
    """
    if not can_profile():
        raise RuntimeError("memory cannot be counted while a profiler is on")
    profile = started_profile()
    try:
        leave_mark(place)
        # A profile keeps no allocation of a GPU's that is made outside of operators.
        with torch.profiler.record_function("mucudnn counted"):
            work()
    finally:
        totals = ended(profile, place)
    before = next(total for total, is_mark in totals if is_mark)
    return max(total for total, _ in totals) - before


def _totals(events: Iterable[Any], place: torch.device, within_mark: bool = False) -> Iterator[tuple[int, bool]]:
    """Marks do not count themselves."""
    for event in events:
        if event.tag.name == "Allocation" and _is_at(place, event.extra_fields.device):
            fields = event.extra_fields
            if not within_mark:
                yield fields.total_allocated, False
            elif fields.alloc_size > 0:
                yield fields.total_allocated - fields.alloc_size, True
        yield from _totals(event.children, place, within_mark or event.name == _MARK)


def _is_at(place: torch.device, found: torch.device) -> bool:
    """Whether both are one device; that of a host has no number."""
    return found.type == place.type and (place.type == "cpu" or found.index == place.index)
