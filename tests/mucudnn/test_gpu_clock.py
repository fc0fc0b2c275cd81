"""The clock of a GPU, on a timeline of the test's own: a host that takes its time to launch, and a GPU that idles."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from mucudnn.devices import gpu

LAUNCH, KERNEL, CYCLE = 2e-5, 3e-6, 5e-10
"""Seconds of the host to launch a kernel, of the kernel, and of a cycle of the GPU."""


class Timeline:
    """The host's time now, and when the GPU will have ended all of its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.gpu, self.slept = 1.0, 0.0, 0.0
        timeline = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = timeline.gpu = max(timeline.gpu, timeline.host)

            def synchronize(self) -> None:
                timeline.host = max(timeline.host, self.at)

            def elapsed_time(self, end: Event) -> float:
                return 1e3 * (end.at - self.at)

        monkeypatch.setattr(time, "perf_counter", lambda: self.host)
        monkeypatch.setattr(torch.cuda, "device", lambda place: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep, raising=False)
        monkeypatch.setattr(gpu, "_awake", set())

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)

    def sleep(self, cycles: int) -> None:
        self.slept += cycles * CYCLE
        self.gpu = max(self.gpu, self.host) + cycles * CYCLE

    def work(self) -> None:
        self.host += LAUNCH
        self.gpu = max(self.gpu, self.host) + KERNEL


def test_times_are_without_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch)
    clock = gpu.GpuClock(torch.device("cuda", 0))
    assert clock.first(timeline.work) == pytest.approx(KERNEL)
    assert clock.seconds(timeline.work) == pytest.approx(KERNEL)
    assert clock.seconds(timeline.work, KERNEL) == pytest.approx(KERNEL)


def test_a_gpu_is_busy_before_the_first_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch)
    gpu.GpuClock(torch.device("cuda", 0)).first(timeline.work)
    assert timeline.slept > gpu.AWAKE
    before = timeline.slept
    gpu.GpuClock(torch.device("cuda", 0)).first(timeline.work)
    assert timeline.slept - before < gpu.AWAKE / 100
