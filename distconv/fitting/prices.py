"""What a device takes for an operation and for a byte, measured in some milliseconds, once in a process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from distconv.fitting.away import place_of
from distconv.model.direct.chains.choice import Prices
from distconv.turns.turning import not_in_turn

CHANNELS, EXTENT = 32, 96  # Of the convolution that is timed, which has 170 million operations.

BYTES = 1 << 23  # That are read, written and moved: they count within the limit of memory.

ROUNDS = 3


@functools.lru_cache(maxsize=8)
def measured_prices(device: str, dtype: torch.dtype) -> Prices:
    """Seconds of an operation of convolutions of a type, of a byte that an operator reads or writes, and of one that
    leaves the device or comes back (``received``). ``device``: its kind.
    """
    with not_in_turn(), torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        x = torch.ones(1, CHANNELS, EXTENT, EXTENT, dtype=dtype, device=device)
        weight = torch.ones(CHANNELS, CHANNELS, 3, 3, dtype=dtype, device=device)
        operations = 2 * CHANNELS * CHANNELS * 9 * EXTENT * EXTENT
        operation = _seconds(device, lambda: torch.conv2d(x, weight, padding=1)) / operations
        source, target = (torch.zeros(BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        written = _seconds(device, lambda: target.copy_(source)) / (2 * BYTES)
        place, storage = place_of(device), source.untyped_storage()

        def there_and_back() -> None:
            key = place.write(storage, place.stream(storage))
            place.read(key, storage)
            place.finish(key, place.stream(storage))
            place.drop(key, BYTES)

        received = _seconds(device, there_and_back) / (2 * BYTES)
    return Prices(0.0, received, operation, written)


def _seconds(device: str, run: Callable[[], object]) -> float:
    """Of the fastest of some rounds, after one that is not counted."""
    taken = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
