"""Peak memory of tensors while some code runs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """What earlier code, such as another test, has left in cycles is released now, and nothing by itself within.

    Its release in the midst of a step would be taken off the bytes of that step.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.freeze()  # the next one does not look through all that is alive now, which takes a second in a long run
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class TensorMemory:
    """Counts bytes of tensors by torch's memory profiler.

    Attributes:
        peak: the most that was alive at once beyond what was at the start, in bytes; set at the end.
    """

    peak: int

    def __enter__(self) -> TensorMemory:
        self._around = contextlib.ExitStack()
        self._around.enter_context(no_garbage())
        self._profile = torch.autograd.profiler.profile(profile_memory=True)
        self._profile.__enter__()
        torch.empty(1, dtype=torch.uint8)  # its event tells what the profiler already counted as alive
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(None, None, None)
        self._around.close()
        # The running total of each event, and not its time: times of neighbouring events may be equal or exchanged.
        events = list(_allocations(self._profile.kineto_results.experimental_event_tree()))
        start = next(event.total_allocated - 1 for event in events if event.alloc_size == 1)
        self.peak = max(event.total_allocated for event in events) - start


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        if event.tag.name == "Allocation":
            yield event.extra_fields
        yield from _allocations(event.children)
