"""A GPU, as torch's CUDA interface shows it. Only this file and `providers/cudnn/` know CUDA."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from mucudnn.devices.device import Clock, Device, Work

# Every convolution calls these functions: finding them in torch would take as long as calling them.
_is_deterministic, _uses_cudnn = torch._C._get_deterministic_algorithms, torch._C._get_cudnn_enabled
_is_deterministic_in_cudnn, _measures = torch._C._get_cudnn_deterministic, torch._C._get_cudnn_benchmark
_precision = torch._C._get_fp32_precision_getter
# A torch without CUDA lacks these two.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
empty_strided: Callable[..., torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", torch.empty_strided
)

LEAST_BATCH = 5e-4  # Seconds of work between two events, so that these weigh little.

MOST_CALLS = 3

LONG = 0.01  # Seconds: where a call takes longer, the time until the GPU begins with it does not count.


AWAKE = 0.05
"""Seconds in which a GPU is busy before anything is timed on it: an idle one has a clock of a fifth of its highest."""

AHEAD = 100_000  # Cycles of a GPU, 50 microseconds, in which the host gets ahead of it by a call.

_awake: set[torch.device] = set()  # The GPUs on which this process has timed something.


def _awaken(place: torch.device) -> None:
    """Keeps the current GPU, which is at a place, busy until its clock has risen; once in a process."""
    if place not in _awake:
        _awake.add(place)
        until = time.perf_counter() + AWAKE
        while time.perf_counter() < until:
            torch.cuda._sleep(10 * AHEAD)
            torch.cuda.current_stream().synchronize()


class GpuClock:
    """Times work that a call enqueues on the current stream, by CUDA events; short work is called several times.

    The GPU is busy when a time begins, so that the host gets ahead of it, as in a program.
    """

    repetitions = 3

    def __init__(self, place: torch.device) -> None:
        self._place = place

    def first(self, work: Work) -> float:
        with torch.cuda.device(self._place):
            _awaken(self._place)
            work()
            return self._elapsed(work, 1)

    def seconds(self, work: Work, expected: float | None = None) -> float:
        with torch.cuda.device(self._place):
            _awaken(self._place)
            once = self._elapsed(work, 1) if expected is None else expected
            if once > LONG:
                return once if expected is None else self._elapsed(work, 1)
            calls = min(MOST_CALLS, math.ceil(LEAST_BATCH / max(once, 1e-9)))
            return self._elapsed(work, calls) / calls

    def _elapsed(self, work: Work, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD * calls)
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class GpuStopwatch:
    """Times work on the current stream, by CUDA events that are read when they have happened."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._marks: list[torch.cuda.Event] = []
        self.lap()

    def lap(self) -> None:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._place))
        self._marks.append(mark)

    def laps(self) -> list[float] | None:
        if not self._marks[-1].query():
            return None
        return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(self._marks)]


class Gpu(Device):
    """A GPU of NVIDIA's."""

    is_asynchronous = True
    uses_cudnn = True

    @staticmethod
    def switches() -> tuple[object, ...]:
        return (
            _is_deterministic(),
            _uses_cudnn(),
            _is_deterministic_in_cudnn(),
            _measures(),
            _precision("cuda", "conv"),
        )

    @staticmethod
    def on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def on_its_device(first: torch.Tensor, *arguments: object) -> Any:
            index = first.get_device()
            if index < 0 or index == current_device():
                return kernel(first, *arguments)
            with torch.cuda.device(first.device):
                return kernel(first, *arguments)

        return on_its_device

    @staticmethod
    def all() -> list[torch.device]:
        """Every GPU of this process. Raises RuntimeError where the driver does not answer."""
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]

    @cached_property
    def index(self) -> int:
        """CUDA's number of it."""
        return torch.cuda.current_device() if self.place.index is None else self.place.index

    @property
    def name(self) -> str:
        return f"cuda {torch.cuda.get_device_name(self.place)}"

    @property
    def memory(self) -> int:
        return int(torch.cuda.get_device_properties(self.place).total_memory)

    @property
    def cache(self) -> int:
        return int(torch.cuda.get_device_properties(self.place).L2_cache_size)

    @property
    def is_deterministic(self) -> bool:
        return super().is_deterministic or torch._C._get_cudnn_deterministic()

    @property
    def precision(self) -> str:
        # Whether torch measures its own choice of kernel is no precision, but as much a switch of its time.
        benchmark = "on" if torch._C._get_cudnn_benchmark() else "off"
        return f"fp32={torch._C._get_fp32_precision_getter('cuda', 'conv')} benchmark={benchmark}"

    @property
    def libraries(self) -> str:
        return f"cuDNN {torch.backends.cudnn.version()}"

    @property
    def clock(self) -> Clock:
        return GpuClock(self.place)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if current_device() != self.index:
            return torch.empty_strided(shape, strides, dtype=dtype, device=self.place)
        return empty_strided(shape, strides, dtype)

    def stopwatch(self) -> GpuStopwatch:
        return GpuStopwatch(self.place)

    def outside(self) -> int:
        free, total = torch.cuda.mem_get_info(self.place)
        return total - free - torch.cuda.memory_reserved(self.place)

    def bytes_in_use(self) -> int:
        """Bytes of torch's tensors on it."""
        # `memory_allocated` flattens and sorts all of the allocator's counters first, ten times as much work as this.
        counters = torch.cuda.memory_stats_as_nested_dict(self.place)
        return int(counters["allocated_bytes"]["all"]["current"]) if counters else 0

    def peak_bytes(self) -> int:
        """The most bytes of tensors on it since the program began, or since it reset that figure."""
        return torch.cuda.max_memory_allocated(self.place)

    def finish(self) -> None:
        torch.cuda.synchronize(self.place)

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()
