"""Memory recorders: how many bytes are alive at each convolution of a few training steps, and at the peak.

On a GPU torch's allocator counts the bytes. On a host it does not, but torch's memory profiler reports the bytes that
are alive at every allocation and release. That is exact, whatever operator or kernel allocates; nothing above the
allocator could tell it. The profiler takes time, so it runs for a few steps only.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from mucudnn.devices import Device, Gpu
from mucudnn.optimizer import Timeline

_MARK = "mucudnn mark"
_QUIET = {"KINETO_LOG_LEVEL": "99"}


class Recorder(Protocol):
    """Records the memory of training steps. Its user calls `step` between steps and `mark` at each convolution.

    Attributes:
        one_thread: whether only the memory of the thread that starts it is seen.
    """

    one_thread: bool

    def start(self) -> bool:
        """Starts to count. The answer is False where that is impossible now, because the program has a profiler on."""
        ...

    def step(self) -> None:
        """Ends the step before, if there is one, and begins the next."""
        ...

    def mark(self, size: int) -> None:
        """Notes that a convolution is called; `size` are the bytes of its result, which is alive from here on."""
        ...

    def stop(self) -> list[Timeline]:
        """Stops counting and returns a timeline for each whole step, in bytes of all that the program holds."""
        ...


class HostRecorder:
    """Torch's memory profiler on the calling thread, which is that of CPU operators forward and backward.

    The profiler does not notice the release of memory that was allocated before it started. So its user lets one step
    pass before the first that is recorded: after that step most of what is alive was allocated under the profiler.
    """

    one_thread = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self._profile: torch.profiler.profile | None = None
        self._steps: list[list[int]] = []
        self._held = 0

    def start(self) -> bool:
        if torch._C._autograd._profiler_enabled():
            return False  # the program's own
        # Asked for before the profiler starts, whose own memory would be counted otherwise.
        self._steps, self._held = [], self._device.held()
        # Without acc_events, torch 2.12 warns of more cycles than the one that there is.
        activities = [torch.profiler.ProfilerActivity.CPU]
        profile = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
        before = {name: os.environ.get(name) for name in _QUIET}
        os.environ.update(_QUIET)
        try:
            profile.__enter__()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self._profile = profile
        return True

    def step(self) -> None:
        self._steps.append([])
        _leave_mark()

    def mark(self, size: int) -> None:
        if self._steps:
            self._steps[-1].append(size)
            _leave_mark()

    def stop(self) -> list[Timeline]:
        try:
            return self._timelines()
        finally:
            gc.collect()  # the profiler's events refer to each other, megabytes of them

    def _timelines(self) -> list[Timeline]:
        profile, self._profile = self._profile, None
        assert profile is not None, "it was started"
        profile.__exit__(None, None, None)
        if not self._steps:
            return []
        # Between two marks of steps: the marks of convolutions, and the most that was alive.
        totals = list(_totals(profile.profiler.kineto_results.experimental_event_tree()))  # type: ignore[union-attr]
        marks = [place for place, (_, is_mark) in enumerate(totals) if is_mark]
        base = self._held - totals[marks[0]][0]
        timelines = []
        for sizes in self._steps[:-1]:
            own, marks = marks[: len(sizes) + 1], marks[len(sizes) + 1 :]
            live = tuple(base + totals[place][0] + size for place, size in zip(own[1:], sizes, strict=True))
            between = (total for total, is_mark in totals[own[0] : marks[0]] if not is_mark)
            peak = base + max(between, default=0)
            timelines.append(Timeline(live, max(peak, *live)))
        return timelines


class GpuRecorder:
    """The counters of torch's allocator on a GPU. The peak is that of the program so far, as resetting the counter
    would disturb a program that reads it, too."""

    one_thread = False

    def __init__(self, device: Gpu) -> None:
        self._device = device
        self._steps: list[list[int]] = []
        self._peaks: list[int] = []

    def start(self) -> bool:
        self._steps, self._peaks = [], []
        return True

    def step(self) -> None:
        self._steps.append([])
        self._peaks.append(self._device.most_held())

    def mark(self, size: int) -> None:
        if self._steps:
            self._steps[-1].append(self._device.held() + _rounded(size))

    def stop(self) -> list[Timeline]:
        return [
            Timeline(tuple(live), max(peak, *live))
            for live, peak in zip(self._steps[:-1], self._peaks[1:], strict=True)
        ]


def recorder(device: Device) -> Recorder:
    """The recorder of a device's memory."""
    return GpuRecorder(device) if isinstance(device, Gpu) else HostRecorder(device)


def _leave_mark() -> None:
    # Its event carries the total of the moment.
    with torch.profiler.record_function(_MARK):
        torch.empty(1, dtype=torch.uint8)


def _totals(events: Iterable[Any], within_mark: bool = False) -> Iterator[tuple[int, bool]]:
    """The bytes alive after every allocation and release, in order, and whether it is a mark; marks do not count."""
    for event in events:
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            if not within_mark:
                yield fields.total_allocated, False
            elif fields.alloc_size > 0:
                yield fields.total_allocated - fields.alloc_size, True
        yield from _totals(event.children, within_mark or event.name == _MARK)


def _rounded(size: int) -> int:
    """Bytes that the allocator of a GPU takes for so many: it gives blocks of 512."""
    return -(-size // 512) * 512
