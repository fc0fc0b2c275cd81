"""Eight layers within workspace limits: torch, the best undivided plan and the best division.

TF32 and float16 in NCHW come first: there engines copy their operands into another layout, so dividing can win. Strict
float32 and float16 in NHWC are the controls, where it is expected not to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.gpu import layers
from benchmarks.gpu.cases import PRECISIONS, LayerUnit
from benchmarks.gpu.fifteen import Run
from benchmarks.gpu.timing import Clock, clock_of
from benchmarks.layers.layer import Layer
from mucudnn.convolution.problem import Direction

MIB = 2**20
LIMITS = (8 * MIB, 64 * MIB, 512 * MIB, math.inf)

FIRST, CONTROLS = ("tf32", "float16-nchw"), ("float32", "float16")

UNIT_SECONDS = 0.5
"""That the arms of a layer and direction take turns."""


def measure(run: Run) -> bool:
    clock = clock_of(run.device)
    for unit in units(run.small):
        if run.figures.has(unit.key):
            continue
        if run.left <= 0:
            return False
        PRECISIONS[unit.precision].apply()
        layers.free(run.device)
        run.attempt(unit.key, _measure, run, unit, clock)
    return True


def _measure(run: Run, unit: LayerUnit, clock: Clock) -> None:
    row = layers.measure(unit, LIMITS, run.device, clock, run.folder / "times.sqlite", None, UNIT_SECONDS)
    run.figures.add(unit.key, _line(row), "torch's time over it; the undivided plan's", row=row)


def units(small: bool) -> Iterator[LayerUnit]:
    """The layers in their directions, what decides most first."""
    chosen = small_layers() if small else [*large_layers()]
    for precisions in (FIRST, CONTROLS):
        for direction in Direction:
            for layer in chosen:
                for precision in precisions:
                    yield LayerUnit("fifteen", layer, precision, direction, "powerOfTwo")


def _layer(
    name: str, samples: int, channels: int, filters: int, size: int, kernel: int, stride: int = 1, dims: int = 2
) -> Layer:
    given, weight = (samples, channels, *(size,) * dims), (filters, channels, *(kernel,) * dims)
    around = (kernel // 2,) * dims
    return Layer(name, given, weight, (stride,) * dims, around, (1,) * dims, 1, False, (0,) * dims)


def large_layers() -> Iterator[Layer]:
    yield _layer("alexnet-2", 256, 64, 192, 27, 5)
    yield _layer("resnet-56", 256, 64, 64, 56, 3)
    yield _layer("vgg-3", 256, 128, 256, 56, 3)
    yield _layer("volume-64", 8, 16, 32, 64, 3, dims=3)
    yield _layer("vgg-1-2", 128, 64, 64, 224, 3)
    yield _layer("resnet-28", 256, 128, 128, 28, 3)
    yield _layer("inception-5x5", 256, 32, 96, 28, 5)
    yield _layer("resnet-7x7", 256, 3, 64, 224, 7, stride=2)


def small_layers() -> list[Layer]:
    return [_layer("small", 4, 4, 4, 8, 3)]


def _line(row: dict[str, object]) -> str:
    limits: dict[str, dict[str, dict[str, float | None]]] = row["limits"]  # type: ignore[assignment]
    told = []
    for limit, entry in limits.items():
        size = "no limit" if limit == "inf" else f"{int(limit) // MIB} MiB"
        over = entry["over"]
        pair = ["-" if over[arm] is None else f"{over[arm]:.2f}" for arm in ("stock", "undivided")]
        told.append(f"{size} {pair[0]} {pair[1]}")
    return "; ".join(told)
