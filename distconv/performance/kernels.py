"""The times of a rank's kernels on this machine's processor, each measured when it is first needed, beside co-runners.

Co-runners are processes that run the measured kernel at the same time, as the other ranks of a machine do in a job.
Ranks on one machine share its caches, its memory and, where there are more threads than cores, its cores. A kernel that
is measured alone runs faster than the same kernel in a step that all ranks compute together.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import distconv.rules.convolution.kernels  # noqa: F401 - an operator that a call may name
from distconv.performance.events import Kernel, KernelCall, Shape
from distconv.performance.kept import Kept

_READY = b"."


class Unmeasurable(ValueError):
    """A kernel whose time cannot be measured here: one line."""


class CoRunners:
    """The other ranks of this machine, started when they are first needed; they end with this process.

    Args:
        others: how many.
        threads: that each has.
    """

    def __init__(self, others: int, threads: int) -> None:
        self.others, self.threads = others, threads
        self._processes: list[subprocess.Popen[bytes]] = []

    @contextlib.contextmanager
    def beside(self, call: KernelCall) -> Iterator[None]:
        """A context in which all other processes run a kernel over and over.

        Raises:
            Unmeasurable: where one of them has ended.
        """
        while len(self._processes) < self.others:
            self._processes.append(_start(self.threads))
        try:
            self._send(call)
            try:
                yield
            finally:
                self._send(None)
        except BrokenPipeError:
            ended = [code for process in self._processes if (code := process.poll()) is not None]
            self.close()
            why = f"a process that computes beside it has ended with exit code {ended[0] if ended else 0}"
            raise Unmeasurable(f"{call.operator} cannot be measured: {why}") from None

    def _send(self, what: KernelCall | None) -> None:
        text = pickle.dumps(what)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(text)
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.read(1) != _READY:
                process.wait()
                raise BrokenPipeError

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    assert pipe is not None
                    pipe.close()
            process.wait()
        self._processes.clear()


def _start(threads: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "distconv.performance.kernels"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # whoever measures has run the kernel before, and reports what becomes of it
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        start_new_session=True,  # Ctrl-C reaches whoever measures, whose end they notice
    )


def prepared(call: KernelCall) -> Callable[[], object]:
    """A function that runs a call on made-up numbers of the recorded shapes."""
    args, kwargs = tree_map(_tensor, (call.args, dict(call.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Shape))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")

    def run() -> object:
        with torch.no_grad():
            return call.operator(*args, **kwargs)

    return run


def _tensor(leaf: object) -> object:
    """Numbers of a shape: random ones where they may be fractions, zeros, which every index accepts, elsewhere."""
    if not isinstance(leaf, Shape):
        return leaf
    span = sum((size - 1) * stride for size, stride in zip(leaf.sizes, leaf.strides, strict=True)) + 1
    numbers: Tensor = torch.zeros(max(span, 0), dtype=leaf.dtype)
    if leaf.dtype.is_floating_point:
        numbers.uniform_()
    return numbers.as_strided(leaf.sizes, leaf.strides)


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


def main() -> None:
    """Runs each kernel that it reads from its input until it reads a stop; ends at the end of its input."""
    requests: Any = sys.stdin.buffer
    while True:
        try:
            call = pickle.load(requests)
        except EOFError:
            return
        run = prepared(call)
        run()
        _answer()
        while not select.select([requests], [], [], 0)[0]:
            run()
        try:
            pickle.load(requests)  # nothing else is sent before this is answered
        except EOFError:
            return
        _answer()


def _answer() -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), _READY)


if __name__ == "__main__":
    main()
