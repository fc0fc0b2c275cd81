"""What the detour through mucudnn costs a convolution that stays with torch's kernel.

python benchmarks/layers/overhead.py

The times are those of the processor in the calling thread, which computes everything.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import parser, turns
from benchmarks.table import Table, show
from mucudnn.runtime import shim
from mucudnn.runtime.session import Session
from mucudnn.settings import Settings

CALLS, ROUNDS = 2000, 15


def microseconds(work: Callable[[], object], calls: int) -> float:
    """Microseconds of a call, over many."""
    start = time.thread_time()
    for _ in range(calls):
        work()
    return 1e6 * (time.thread_time() - start) / calls


def detour(work: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of a call with torch as it is and with the shim, in turn, medians."""
    session = Session(Settings.from_environment({}, database=":memory:"))

    def under(arm: Session | None) -> float:
        shim.install(arm)
        microseconds(work, 100)
        return microseconds(work, CALLS)

    times = turns({"stock": partial(under, None), "shim": partial(under, session)}, 0, ROUNDS)
    shim.install(None)
    return statistics.median(times["stock"]), statistics.median(times["shim"])


def detours() -> Table:
    image, kernel = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 1, 1)
    parameter = kernel.clone().requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            functional.conv2d(image, kernel)

    output = functional.conv2d(image, parameter)
    gradient = torch.ones_like(output)

    def backward() -> None:
        torch.autograd.grad(output, parameter, gradient, retain_graph=True)

    def training() -> None:
        functional.conv2d(image, parameter).sum().backward()

    cells = []
    works = {"forward, no grad": forward, "backward filter": backward, "forward + backward filter": training}
    for name, work in works.items():
        stock, shimmed = detour(work)
        cells.append((name, f"{stock:.1f}", f"{shimmed:.1f}", f"{shimmed - stock:.1f}"))
    return Table("detour of a 1x1 kernel on a 4x4 image", ("call", "stock µs", "shim µs", "detour µs"), cells)


def main() -> None:
    print(parser(__doc__).parse_args().before)
    torch.set_num_threads(1)
    show([detours()])


if __name__ == "__main__":
    main()
