"""The campaign of planted faults, a few dozen draws of it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.layers import checking


@pytest.fixture(autouse=True)
def _without_onednn() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.backends.mkldnn.flags(enabled=False):
        yield
    torch.set_num_threads(threads)


def test_every_planted_fault_is_caught() -> None:
    for fault, figures in checking.wrong(24).items():
        assert figures["caught"] == figures["results"] == 24, (fault, figures["missed"])


def test_nothing_right_is_refused() -> None:
    found = checking.right(120, first=20000)
    assert not found["refused"] and not found["torch's own"]
    assert set(found["results"]) == {"fft", "gemm", "slices", "stock", "stock@channels_last"}
