"""Threads that train, measure, report and fork at once, in one patched process: what hangs, and what is wrong.

    python benchmarks/faults/thread_faults.py             # 200 runs
    python benchmarks/faults/thread_faults.py --runs 2    # seconds
    python benchmarks/faults/thread_faults.py --save      # keeps table and figures in benchmarks/results

A run is a process with four threads that train two models, each thread its own copies, within a total of workspace that
they share. Meanwhile each thread switches torch's deterministic algorithms on or off, for the whole process; reads its
batches by a `DataLoader` whose forked worker convolves; and reads mucudnn's report. Every run draws anew what comes
when. A run that has not ended in time *hangs*. It is *wrong* if a weight differs from that of the same training by
plain torch in one thread, in float64, or if anything raises. The exit code is 1 where any run hangs or is wrong.
"""

from __future__ import annotations

import copy
import os
import signal
import statistics
import sys
import threading
import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import mucudnn
from benchmarks.harness import finish, parser
from benchmarks.table import Table

THREADS, STEPS, TOLERANCE = 4, 6, 1e-9
HANGS = "hangs"


class Batches(Dataset[Tensor]):
    """A thread's inputs, smoothed by a convolution where they are read."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self._thread + step)
        x = torch.randn(4 + step % 2, 3, 24, 24, dtype=torch.float64, generator=generator)
        return nn.functional.conv2d(x, torch.ones(3, 1, 5, 5, dtype=torch.float64) / 25, padding=2, groups=3)


def models() -> list[nn.Module]:
    """Two models with layers of the same and of different shapes."""
    torch.manual_seed(0)
    wide = [nn.Conv2d(3, 8, 9, padding=4), nn.Tanh(), nn.Conv2d(8, 8, 9, padding=4), nn.Conv2d(8, 8, 9, padding=4)]
    deep = [nn.Conv2d(3, 8, 9, padding=4), nn.Tanh(), nn.Conv2d(8, 4, 7, stride=2), nn.Conv2d(4, 4, 3)]
    return [nn.Sequential(*layers).double() for layers in (wide, deep)]


def trained(start: list[nn.Module], thread: int, draw: Random | None = None) -> list[nn.Module]:
    """Copies of the models after the training of a thread, with everything else in between where there is a draw."""
    mine = [copy.deepcopy(model) for model in start]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in mine]
    workers: dict[str, Any] = {} if draw is None else {"num_workers": 1, "multiprocessing_context": "fork"}
    # A loader draws its seed. With torch's own generator, whose lock stays locked in a worker that another thread's
    # loader forks meanwhile, plain torch hangs, too.
    for x in DataLoader(Batches(thread), batch_size=None, generator=torch.Generator(), **workers):
        for model, optimizer in zip(mine, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if draw is not None:
                if draw.random() < 0.3:
                    torch.use_deterministic_algorithms(draw.random() < 0.5)
                if draw.random() < 0.3:
                    list(map(str, mucudnn.report()))
                time.sleep(draw.choice((0.0, 0.0, 1e-3)))
    return mine


def run(number: int, start: list[nn.Module], expected: list[list[nn.Module]]) -> str:
    """One run, in this process: what was wrong, in one line; empty for nothing."""
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking while there are threads
    found: dict[int, list[nn.Module]] = {}
    faults: list[str] = []
    draw = Random(number)

    def work(thread: int) -> None:
        try:
            found[thread] = trained(start, thread, Random(f"{number} {thread}"))
        except BaseException as error:
            faults.append(f"{type(error).__name__}: {error}".splitlines()[0])

    total = draw.choice(("256KiB", "2MiB", "64MiB"))
    with mucudnn.patched(database=":memory:", total_workspace_size=total, planning=draw.choice(("auto", "ahead"))):
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one, mine in found.items():
        for model, other in zip(mine, expected[one], strict=True):
            for (name, weight), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
                error = float((weight - wanted).detach().abs().max())
                if not error <= TOLERANCE:
                    faults.append(f"{name} of thread {one} differs by {error:.1e}")
    return "; ".join(faults)


def outcome(number: int, start: list[nn.Module], expected: list[list[nn.Module]], patience: int) -> tuple[str, float]:
    """How a run ends in a process of its own: "", what is wrong, or "hangs"; and the seconds it took."""
    began = time.perf_counter()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgrp()
        fault = "it ended early"
        try:
            fault = run(number, start, expected)
        finally:
            os.write(write, fault.encode()[:4000])
            os._exit(0)
    os.close(write)
    timer = threading.Timer(patience, os.killpg, (child, signal.SIGKILL))
    timer.start()
    with os.fdopen(read, "rb") as pipe:
        fault = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    hung = timer.finished.is_set()
    timer.cancel()
    seconds = time.perf_counter() - began
    if hung:
        return HANGS, seconds
    return f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else fault, seconds


def main() -> int:
    made = parser(__doc__, "thread-faults")
    made.add_argument("--runs", type=int, default=200, help="processes to run (%(default)s)")
    made.add_argument("--seed", type=int, default=0, help="of the first run, the next ones count on (%(default)s)")
    made.add_argument("--patience", type=int, default=300, help="seconds until a run hangs (%(default)s)")
    chosen = made.parse_args()
    torch.set_num_threads(1)  # threads of OpenMP do not come through a fork
    start = models()
    expected = [trained(start, thread) for thread in range(THREADS)]
    ends = [
        outcome(number, start, expected, chosen.patience) for number in range(chosen.seed, chosen.seed + chosen.runs)
    ]
    for number, (fault, _) in enumerate(ends, chosen.seed):
        if fault:
            print(f"run {number}: {fault}", flush=True)
    hung, wrong = sum(fault == HANGS for fault, _ in ends), sum(fault not in ("", HANGS) for fault, _ in ends)
    seconds = statistics.median(seconds for _, seconds in ends)
    figures = {"runs": len(ends), "hang": hung, "wrong": wrong, "median s": round(seconds, 1)}
    table = Table(
        "Threads that train, plan, report and fork", ("what", "number"), [(k, f"{v}") for k, v in figures.items()]
    )
    finish(chosen, "thread-faults", "Threads within one patched process", __doc__, [table])
    return int(bool(hung or wrong))


if __name__ == "__main__":
    sys.exit(main())
