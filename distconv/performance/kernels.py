"""The times of a rank's kernels on this machine's processor, each measured when it is first needed."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from distconv.performance.co_runners import CoRunners, Unmeasurable, prepared
from distconv.performance.events import Kernel, KernelCall
from distconv.performance.kept import Kept

RUNS = 9  # Times that a kernel is measured, of which the median counts.

LONG = 0.1  # Seconds of measuring after which a kernel is not run again.

SHORT = 2e-4  # Seconds: a kernel that takes less is run several times for each of its measurements.


class Measured:
    """Kernels run here on numbers of the recorded shapes, each once for all programs that share what is kept.

    While one is measured, as many processes run the same kernel as there are other ranks on this machine. Of a rank
    with one thread its processor time counts, so that what else runs here counts little.

    Args:
        threads: that a rank of the job has.
        kept: the times.
        ranks: of the job on this machine, which share its cores.
        beside: whether to start processes in the place of the other ranks; not where these measure as well.
    """

    def __init__(self, threads: int, kept: Kept, ranks: int = 1, beside: bool = True) -> None:
        self.threads, self.kept, self.ranks = threads, kept, ranks
        self.co_runners = CoRunners(ranks - 1 if beside else 0, threads)
        self.share = max(1.0, ranks * threads / (os.cpu_count() or 1))
        """How many threads share a core, by which times grow."""
        self._known: dict[str, float] = {}
        self._doubted = False

    def __call__(self, kernel: Kernel) -> float | None:
        """Seconds of a kernel; None for one whose call was not recorded.

        Raises:
            Unmeasurable: one line, for a kernel that does not run on its own.
        """
        if kernel.call is None:
            return None
        key = f"kernel torch {torch.__version__}, {self.ranks} ranks, {self.threads} threads: {kernel.call}"
        if key not in self._known:
            before = self.kept.get(key)
            seconds = math.inf if before is None else float(before)
            if before is None or self._doubted:
                seconds = min(seconds, self._measured(kernel.call, 1 if self._doubted else self.threads))
                self.kept.put(key, repr(seconds))
            self._known[key] = seconds
        return self.share * self._known[key]

    def _measured(self, call: KernelCall, threads: int) -> float:
        with threads_of_torch(threads):
            try:
                run = prepared(call)
                run()
            except Exception as error:  # whatever torch says of a call outside of its step
                why = (str(error).splitlines() or [type(error).__name__])[0]
                raise Unmeasurable(f"{call.operator} cannot be measured: {why}") from None
            with self.co_runners.beside(call):
                return measure_kernel(run, threads)

    def doubt(self) -> None:
        """Every kernel is measured again where it is asked for next, by the processor time of one thread: more threads
        take no longer, and what else runs here does not count. The lesser of its times is kept."""
        self._known, self._doubted = {}, True

    def forget(self, kept: Kept) -> None:
        """Kernels are measured anew where ``kept``, to which their times are added, has none of them."""
        self.kept, self._known = kept, {}


def measured_for(ranks: int, kept: Kept) -> Measured:
    """Kernels of so many ranks on this machine, which share its cores as `distconv run` shares them out."""
    cores = os.cpu_count() or 1
    return Measured(int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // ranks)), kept, ranks)


def measure_kernel(run: Callable[[], object], threads: int) -> float:
    """Seconds of a kernel that has run before on this machine's processor, the median of some."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    start = clock()
    run()
    count = max(1, min(100, round(SHORT / max(clock() - start, 1e-7))))
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < RUNS and (not times or time.perf_counter() - begun < LONG):
        start = clock()
        for _ in range(count):
            run()
        times.append((clock() - start) / count)
    return statistics.median(times)


@contextlib.contextmanager
def threads_of_torch(number: int) -> Iterator[None]:
    """A context in which torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
