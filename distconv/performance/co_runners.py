"""Co-runners: processes that run the measured kernel at the same time, as the other ranks of a machine do in a job.

Ranks on one machine share its caches, its memory and, where there are more threads than cores, its cores. A kernel that
is measured alone runs faster than the same kernel in a step that all ranks compute together.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import distconv.rules.convolution.kernels  # noqa: F401 - an operator that a call may name
from distconv.performance.events import KernelCall, Shape

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
        [sys.executable, "-m", "distconv.performance.co_runners"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # whoever measures has run the kernel before, and reports what becomes of it
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        start_new_session=True,  # Ctrl-C reaches whoever measures, whose end they notice
    )


def main() -> None:
    """Runs each kernel that it reads from its input until it reads a stop; ends at the end of its input."""
    from distconv.performance.co_runners import prepared

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
