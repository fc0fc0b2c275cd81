"""How long a rank's kernels take on this machine's processor, measured where they are asked for."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from distconv.performance.events import Call, Kernel, Shape
from distconv.performance.kept import Kept

RUNS = 5
"""Times that a kernel is measured, of which the least counts."""

LONG = 0.1
"""Seconds of measuring after which a kernel is not run again."""


class Measured:
    """Kernels run here on numbers of the recorded shapes, each once for all programs that share what is kept.

    Args:
        threads: that a rank of the job has.
        kept: the times.
        crowd: how many threads of the job's ranks share a core, by which times grow; at least 1.
    """

    def __init__(self, threads: int, kept: Kept, crowd: float = 1.0) -> None:
        self.threads, self.kept, self.crowd = threads, kept, crowd
        self._known: dict[str, float] = {}

    def __call__(self, kernel: Kernel) -> float | None:
        """Seconds of a kernel; None for one whose call was not recorded."""
        if kernel.call is None:
            return None
        key = f"kernel torch {torch.__version__}, {self.threads} threads: {kernel.call}"
        if key not in self._known:
            before = self.kept.get(key)
            if before is None:
                with _threads(self.threads):
                    before = repr(measure(kernel.call))
                self.kept.put(key, before)
            self._known[key] = float(before)
        return self.crowd * self._known[key]


def measured_for(ranks: int, kept: Kept) -> Measured:
    """Kernels of so many ranks on this machine, which share its cores as `distconv run` shares them out."""
    cores = os.cpu_count() or 1
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // ranks))
    return Measured(threads, kept, max(1.0, ranks * threads / cores))


def measure(call: Call) -> float:
    """The least seconds of a call on this machine's processor, so that what else runs here counts little."""
    args, kwargs = tree_map(_tensor, (call.args, dict(call.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Shape))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    times: list[float] = []
    with torch.no_grad():
        call.operator(*args, **kwargs)
        while len(times) < RUNS and sum(times) < LONG:
            start = time.perf_counter()
            call.operator(*args, **kwargs)
            times.append(time.perf_counter() - start)
    return min(times)


def _tensor(leaf: object) -> object:
    """Numbers of a shape: random ones where they may be fractions, zeros, which every index accepts, elsewhere."""
    if not isinstance(leaf, Shape):
        return leaf
    span = sum((size - 1) * stride for size, stride in zip(leaf.sizes, leaf.strides, strict=True)) + 1
    numbers: Tensor = torch.zeros(max(span, 0), dtype=leaf.dtype)
    if leaf.dtype.is_floating_point:
        numbers.uniform_()
    return numbers.as_strided(leaf.sizes, leaf.strides)


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
