"""Training steps of AlexNet and ResNet-18: torch in four ways, and mucudnn within 64 MiB, a process for each."""

from __future__ import annotations

from benchmarks.gpu import iterations
from benchmarks.gpu.cases import IterationUnit
from benchmarks.gpu.fifteen import Run
from benchmarks.process import Failed

MIB = 2**20
LIMIT = 64 * MIB

ARMS = ("stock", "torch", "channels_last", "capped", "mucudnn")

TURNS_SECONDS = 8.0
"""That the arms of a network take turns."""


def measure(run: Run) -> bool:
    for precision in ("tf32",) if run.small else ("tf32", "float16-nchw"):
        for network in ("resnet18",) if run.small else ("alexnet", "resnet18"):
            name = f"{network}, {precision}"
            if run.figures.has(name):
                continue
            if run.left < TURNS_SECONDS:
                return False
            unit = IterationUnit(f"{network}-small" if run.small else network, precision, LIMIT)
            try:
                row = iterations.measure(unit, run.device, run.folder / "times.sqlite", TURNS_SECONDS, ARMS)
            except Failed as error:
                run.figures.add(name, f"failed: {error}")
                continue
            for arm, seconds in row["seconds"].items():
                run.figures.add(f"{name}: {arm}", 1e3 * seconds, "ms")
                for kind in ("peaks", "outside"):  # of torch's allocator, and outside it
                    if row[kind][arm] is not None:
                        run.figures.add(f"{name}: {arm}, {kind}", row[kind][arm] / MIB, "MiB")
            for step in ("benchmarking", "planning"):
                run.figures.add(f"{name}: mucudnn, {step} of the first step", row[step], "s")
            over = ", ".join(f"{arm} {ratio:.2f}" for arm, ratio in row["over"].items())
            failed = "".join(f"; {arm} failed: {reason}" for arm, reason in row["failures"].items())
            run.figures.add(name, f"{over}{failed}", "times over mucudnn's", row=row)
    return True
