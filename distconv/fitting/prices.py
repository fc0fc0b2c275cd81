"""The seconds that a device takes for an operation and for a byte, measured in some milliseconds, once in a process."""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable

import torch

from distconv.fitting.moving import storage_place
from distconv.model.direct.chains.choice import Prices
from distconv.turns.turning import not_in_turn

CHANNELS, EXTENT = 64, 64  # Sizes of the convolution that is timed, which has 302 million operations.

MOST = 1 << 23
"""The most bytes that are read, written and moved. They count within the limit of memory."""

ROUNDS, MOST_ROUNDS, MOST_SECONDS = 3, 16, 0.03  # Rounds after the first three end when so much time has passed.

NEW_PAGES = 0.25
"""The share of operators whose results get new pages of memory, which the system has to set up. On a processor, with a
share of 0 a step of SwinUNETR was predicted to take an eighth of what was measured, and with a half one of NAFNet three
times that (benchmarks/fitting/networks.py)."""


@functools.lru_cache(maxsize=8)
def measured_prices(device: str, dtype: torch.dtype, size: int = MOST) -> Prices:
    """Seconds for an operation of convolutions of a type, for a byte that an operator reads or writes (``written``),
    and for one that is moved off the device or back (``received``). ``device``: its kind. ``size``: of the tensors
    that are moved to measure it, in bytes.
    """
    with not_in_turn(), torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        x = torch.ones(1, CHANNELS, EXTENT, EXTENT, dtype=dtype, device=device)
        weight = torch.ones(CHANNELS, CHANNELS, 3, 3, dtype=dtype, device=device)
        operations = 2 * CHANNELS * CHANNELS * 9 * EXTENT * EXTENT
        operation = _seconds(device, lambda: torch.conv2d(x, weight, padding=1)) / operations
        source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        kept = _seconds(device, lambda: target.copy_(source))
        new = _seconds(device, lambda: _new(device, size).copy_(source))
        written = ((1 - NEW_PAGES) * kept + NEW_PAGES * new) / (2 * size)
        place, storage = storage_place(device), source.untyped_storage()

        def there_and_back() -> None:
            key, back = place.write(storage, place.stream(storage)), _new(device, size).untyped_storage()
            place.read(key, back)
            place.finish(key, place.stream(back))
            place.drop(key, size)

        received = _seconds(device, there_and_back) / (2 * size)
    return Prices(0.0, received, operation, written)


def _new(device: str, size: int) -> torch.Tensor:
    """A tensor of new memory; on a processor its pages are yet to be set up, as for most storages that return."""
    if device != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def _seconds(device: str, run: Callable[[], object]) -> float:
    """The seconds of the fastest of some rounds, after one that is not counted. Other programs slow down some."""
    taken: list[float] = []
    while len(taken) <= ROUNDS or (len(taken) <= MOST_ROUNDS and sum(taken) < MOST_SECONDS):
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
