"""Copies batches from the host to a GPU while the GPU still computes the previous one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ToDevice:
    """Copies tensors of the host to a device.

    A script's host runs ahead of its GPU: when it asks for a batch, kernels of the step before are still queued. A copy
    in their stream would wait for all of them, so copies have a stream of their own, from pinned memory, and only what
    is computed from now on waits for them.

    Args:
        device_type: such as "cpu" or "cuda".
        gpu: what `torch.cuda` is to the program.
    """

    def __init__(self, device_type: str, gpu: Any = torch.cuda) -> None:
        self._device_type, self._gpu = device_type, gpu
        self._has_streams = device_type == "cuda" and gpu.is_available()
        self._stream: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        if not self._has_streams or x.device.type != "cpu":
            return x.to(self._device_type)
        self._stream = self._stream or self._gpu.Stream()
        pinned = x if x.is_pinned() else x.pin_memory()
        with self._gpu.stream(self._stream):
            there = pinned.to(self._device_type, non_blocking=True)
        current = self._gpu.current_stream()
        current.wait_stream(self._stream)
        there.record_stream(current)  # or its memory could be given away while the program still computes with it
        return there
