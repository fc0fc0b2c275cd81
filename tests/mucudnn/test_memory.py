"""The recorder of the host's memory, against torch's profiler."""

from __future__ import annotations

import torch

from mucudnn.budgets.memory import HostRecorder
from mucudnn.devices import device_of

HOST = device_of(torch.device("cpu"))
KIB = 2**10
MIB = 2**20


def test_the_recorder_agrees_with_the_profiler() -> None:
    recorder = HostRecorder(HOST)
    old = torch.empty(3 * MIB, dtype=torch.uint8)
    before = HOST.bytes_in_use()
    assert recorder.start()
    for _ in range(3):
        recorder.step()
        one = torch.empty(MIB, dtype=torch.uint8)
        recorder.mark(100)
        two = torch.empty(2 * MIB, dtype=torch.uint8)
        del one
        recorder.mark(0)
        del two
    first, second = recorder.stop()
    assert first == second
    assert first.live == (first.live[0], first.live[0] + MIB - 100)
    assert first.peak == first.live[0] - 100 + 2 * MIB
    assert abs(first.live[0] - 100 - MIB - before) < 256 * KIB  # of all that the process holds
    assert old.numel()


def test_two_profilers_do_not_meet() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not HostRecorder(HOST).start()
