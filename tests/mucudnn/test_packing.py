"""The host's own work in a divided convolution."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from forced import forced
from torch.nn import functional


@pytest.mark.parametrize("algorithm", ["gemm", "fft", "stock"])
def test_a_divided_convolution_calls_few_functions(algorithm: str) -> None:
    calls: list[str] = []

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/mucudnn/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_qualname)

    x, w = torch.randn(4, 3, 9, 9), torch.randn(5, 3, 3, 3)
    with forced(algorithm, spatial=True, planning="ahead"):
        for _ in range(2):
            functional.conv2d(x, w, padding=1)
        before = sys.getprofile()
        sys.setprofile(seen)
        try:
            functional.conv2d(x, w, padding=1)
        finally:
            sys.setprofile(before)
    assert 8 < len(calls) <= 29, calls
