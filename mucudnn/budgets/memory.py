"""Records how many bytes are alive at each convolution of a few training steps, and at the peak.

On a GPU torch's allocator counts the bytes. On a host it does not, but torch's memory profiler does. The profiler takes
time, so it runs for a few steps only.
"""

from __future__ import annotations

import torch

from mucudnn.devices import Device, Gpu, allocations
from mucudnn.optimizer import StepTimeline


class HostRecorder:
    """Records the memory of training steps by torch's memory profiler on the calling thread, which is that of CPU
    operators forward and backward. Its user calls `step` between steps and `mark` at each convolution.

    The profiler does not notice the release of memory that was allocated before it started. So its user lets one step
    pass before the first that is recorded: after that step most of what is alive was allocated under the profiler.
    """

    one_thread = True  # Whether only the memory of the thread that starts it is seen.

    def __init__(self, device: Device) -> None:
        self._device = device
        self._profile: torch.autograd.profiler.profile | None = None
        self._steps: list[list[int]] = []
        self._at_start = 0

    def start(self) -> bool:
        """Starts to count. The answer is False where that is impossible now, because the program has a profiler on."""
        if not allocations.can_profile():
            return False
        # Asked for before the profiler starts, whose own memory would be counted otherwise.
        self._steps, self._at_start = [], self._device.bytes_in_use()
        self._profile = allocations.started_profile()
        return True

    def step(self) -> None:
        """Ends the step before, if there is one, and begins the next."""
        self._steps.append([])
        allocations.leave_mark(self._device.place)

    def mark(self, size: int) -> None:
        """Notes that a convolution is called; `size` are the bytes of its result, which is alive from here on."""
        if self._steps:
            self._steps[-1].append(size)
            allocations.leave_mark(self._device.place)

    def stop(self) -> list[StepTimeline]:
        """Stops counting and returns a timeline for each whole step, in bytes of all memory of the program."""
        profile, self._profile = self._profile, None
        assert profile is not None, "it was started"
        totals = allocations.ended(profile, self._device.place)
        if not self._steps:
            return []
        # Between two marks of steps: the marks of convolutions, and the most that was alive.
        marks = [place for place, (_, is_mark) in enumerate(totals) if is_mark]
        base = self._at_start - totals[marks[0]][0]
        timelines = []
        for sizes in self._steps[:-1]:
            own, marks = marks[: len(sizes) + 1], marks[len(sizes) + 1 :]
            live = tuple(base + totals[place][0] + size for place, size in zip(own[1:], sizes, strict=True))
            between = (total for total, is_mark in totals[own[0] : marks[0]] if not is_mark)
            peak = base + max(between, default=0)
            timelines.append(StepTimeline(live, max(peak, *live)))
        return timelines


class GpuRecorder:
    """The same by the counters of torch's allocator on a GPU. The peak is that of the program so far, as resetting the
    counter would disturb a program that reads it, too."""

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
        self._peaks.append(self._device.peak_bytes())

    def mark(self, size: int) -> None:
        if self._steps:
            # The allocator of a GPU gives blocks of 512 bytes.
            self._steps[-1].append(self._device.bytes_in_use() + -(-size // 512) * 512)

    def stop(self) -> list[StepTimeline]:
        return [
            StepTimeline(tuple(live), max(peak, *live))
            for live, peak in zip(self._steps[:-1], self._peaks[1:], strict=True)
        ]


MemoryRecorder = HostRecorder | GpuRecorder


def recorder(device: Device) -> MemoryRecorder:
    """The recorder of a device's memory."""
    return GpuRecorder(device) if isinstance(device, Gpu) else HostRecorder(device)
