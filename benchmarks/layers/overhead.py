"""What mucudnn itself costs: the detour of a convolution that stays with torch's kernel, a part, the making of plans.

python benchmarks/layers/overhead.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from ctypes import c_void_p
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.detour import CALLS, ROUNDS, detour, microseconds
from benchmarks.layers.elsewhere import wheel_library
from benchmarks.layers.engines import NoCard
from benchmarks.table import Table, conditions, save, show
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.optimizer import Division, Option, best_division, micro_batch_sizes
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.library import Library, Unavailable
from mucudnn.timing.measurement import synthetic_operands
from mucudnn.timing.schedule import Schedule

RESULT = "overhead-cpu"
MANY = 64


def planning_seconds(batch: int, algorithms: int) -> float:
    """Seconds of the dynamic programme with the policy `all`, median."""
    generator = random.Random(0)
    options = [
        Option(size, f"algorithm {number}", size * generator.uniform(0.5, 1.5), generator.randrange(2**20))
        for size in micro_batch_sizes("all", batch)
        for number in range(algorithms)
    ]
    return statistics.median(microseconds(lambda: best_division(options, batch, 2**19), 1) for _ in range(5)) / 1e6


class Stubbed(NoCard):
    """Stands in for cuDNN's handle and workspace: the call that would use them is stubbed."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._workspace = torch.empty(1)
        library.cudnnBackendExecute = lambda handle, plan, pack: 0

    def handle(self) -> c_void_p:
        return c_void_p(1)

    def scratch(self, size: int) -> torch.Tensor:
        return self._workspace


def part_microseconds(library: Library, parts: int) -> float:
    """Processor microseconds of Python per part of a planned cuDNN convolution, its last library call stubbed."""
    problem = ConvProblem.of_convolution(
        Direction.FORWARD, (MANY, 64, 27, 27), (192, 64, 5, 5), stride=(1, 1), padding=(2, 2), dilation=(1, 1)
    )
    operands, engines = synthetic_operands(problem), Engines(Stubbed(library))
    division = Division((Option(MANY // parts, "eng1", 0.0, 0),) * parts)
    schedule = Schedule(problem, division, {"eng1": engines})
    schedule.run(operands)
    calls, found = CALLS // parts, []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(calls):
            schedule.run(operands)
        found.append(1e6 * (time.thread_time() - start) / calls / parts)
    return statistics.median(found)


def detours() -> Table:
    """The detour of a convolution that stays with torch's kernel."""
    image, kernel = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 1, 1)
    parameter = kernel.clone().requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            functional.conv2d(image, kernel)

    def training() -> None:
        functional.conv2d(image, parameter).sum().backward()

    cells = []
    for name, work in (("forward, no grad", forward), ("forward + backward filter", training)):
        stock, shimmed = detour(work)
        cells.append((name, f"{stock:.1f}", f"{shimmed:.1f}", f"{shimmed - stock:.1f}"))
    return Table("detour of a 1x1 kernel on a 4x4 image", ("call", "stock µs", "shim µs", "detour µs"), cells)


def parts(library: Library) -> Table:
    """The host's time per part of a convolution that cuDNN computes by a plan."""
    cells = [(str(parts), f"{part_microseconds(library, parts):.1f}") for parts in (1, 2, 4, 16, MANY)]
    return Table("cuDNN, the call that runs a plan stubbed", ("parts", "µs per part"), cells)


def plans() -> Table:
    """How long plans take to make."""
    cells = [
        (f"policy all, mini-batch {batch}, 8 algorithms", f"{planning_seconds(batch, 8):.4f}") for batch in (256, 1024)
    ]
    return Table("workspace reuse", ("plan", "seconds"), cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"keep the figures in benchmarks/results/{RESULT}.*")
    options = parser.parse_args()
    before = conditions()
    torch.set_num_threads(1)
    tables = [detours(), plans()]
    with tempfile.TemporaryDirectory() as folder:
        try:
            tables.append(parts(wheel_library(Path(folder))))
        except Unavailable as error:
            print(f"overhead.py: a part of a cuDNN convolution is not measured: {error}", file=sys.stderr)
    show(tables)
    if options.save:
        save(RESULT, "What mucudnn itself costs", f"`python benchmarks/layers/overhead.py`: {before}", tables)


if __name__ == "__main__":
    main()
