"""Batches that are copied to a GPU while it computes."""

from __future__ import annotations

import pytest
import torch

from distconv.job.samples import ToDevice


def test_copies_arrive_before_what_is_computed_from_them(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("streams are CUDA's own")
    to_device = ToDevice("cuda")
    work = torch.randn(2048, 2048, device=device)
    for number in range(20):
        for _ in range(5):
            work = work @ work.softmax(0)  # queued before the copy, which does not wait for it
        there = to_device(torch.full((1 << 20,), float(number)))
        assert there.device.type == "cuda" and bool((there + 1 == number + 1).all())
