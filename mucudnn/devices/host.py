"""The host: convolutions on the processor."""

from __future__ import annotations

import itertools
import os
import platform
import time
from functools import cache
from operator import sub
from pathlib import Path

import torch

from mucudnn.devices import speeds
from mucudnn.devices.device import Clock, Device, Work
from mucudnn.devices.process_memory import heap_bytes

_COUNTS_WELL = time.get_clock_info("process_time").resolution <= 1e-6


class HostClock:
    """Times work that is done when its call returns."""

    repetitions = 5

    def first(self, work: Work) -> float:
        return self.seconds(work)  # what a first call does beside its work takes little time on a host

    def seconds(self, work: Work, expected: float | None = None) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


HOST_CLOCK = HostClock()


class HostStopwatch:
    """Times work that is done when its call returns.

    Where the processor works for others meanwhile, the process takes less of its time than passes by the clock, and
    that counts: otherwise what is slower would win by chance on a busy machine.
    """

    def __init__(self) -> None:
        self._marks = [_now()]

    def lap(self) -> None:
        self._marks.append(_now())

    def laps(self) -> list[float]:
        return [min(map(sub, end, start)) for start, end in itertools.pairwise(self._marks)]

    def seconds(self) -> float:
        """Seconds from the beginning until now."""
        return min(map(sub, _now(), self._marks[0]))


def _now() -> tuple[float, ...]:
    """Seconds by the clock and, where these are counted finely enough, of the process on all processors."""
    return (time.perf_counter(), time.process_time()) if _COUNTS_WELL else (time.perf_counter(),)


class Host(Device):
    """The processor and its memory."""

    is_asynchronous = False
    uses_cudnn = False

    @staticmethod
    def switches() -> tuple[object, ...]:
        return (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch._C._get_mkldnn_enabled(),
            torch._C._get_fp32_precision_getter("mkldnn", "conv"),
        )

    @property
    def name(self) -> str:
        return f"cpu {_processor()}"

    @property
    def memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def precision(self) -> str:
        enabled = torch._C._get_mkldnn_enabled()
        return f"mkldnn={'on' if enabled else 'off'} fp32={torch._C._get_fp32_precision_getter('mkldnn', 'conv')}"

    @property
    def clock(self) -> Clock:
        return HOST_CLOCK

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype)

    def stopwatch(self) -> HostStopwatch:
        return HostStopwatch()

    def finish(self) -> None:
        """Nothing: work is done when its call returns."""

    def least_seconds(self, operations: float, written: float, fresh: float, dtype: torch.dtype) -> float:
        seconds = operations / speeds.operations(dtype, self.threads) if operations else 0.0
        seconds += (written - fresh) / speeds.writing_speed(False, self.threads) if written > fresh else 0.0
        return seconds + (fresh / speeds.writing_speed(True, self.threads) if fresh else 0.0)

    def measure_speeds(self, dtype: torch.dtype) -> float:
        watch = HostStopwatch()
        speeds.measure_type(dtype, self.threads)
        return watch.seconds()

    def took(self, seconds: float, operations: float, written: float, fresh: float, dtype: torch.dtype) -> bool:
        least = self.least_seconds(operations, written, fresh, dtype)
        is_faster = 0 < seconds < least
        if is_faster:
            speeds.raise_by(least / seconds, dtype, self.threads)
        return is_faster

    def bytes_in_use(self) -> int:
        """Bytes that the process has allocated: torch does not count the host's tensors."""
        return heap_bytes()


@cache
def _processor() -> str:
    """The processor's model; Python's own answer is empty on Linux."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
