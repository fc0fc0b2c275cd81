"""What mucudnn asks of CUDA, tried on a host: stand-ins take the place of the device."""

from __future__ import annotations

import pytest
import torch

from mucudnn.devices import Gpu


def test_a_devices_memory_is_one_counter_and_not_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def flattened(device: object = None) -> dict[str, int]:
        raise AssertionError("every counter is read")

    counters = {"allocated_bytes": {"all": {"current": 123, "peak": 456}}}
    monkeypatch.setattr(torch.cuda, "memory_stats", flattened)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: counters)
    assert Gpu(torch.device("cuda", 0)).bytes_in_use() == 123
    counters.clear()  # as before the first use of CUDA
    assert Gpu(torch.device("cuda", 0)).bytes_in_use() == 0
