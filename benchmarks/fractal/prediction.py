"""Steps of the U-Net on whole volumes of 128 to 2,048 voxels a side, by the performance model: nothing is measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.fractal.unet import UNet
from benchmarks.fractal.volumes import COLOURS
from benchmarks.table import Table
from distconv.performance.candidates import partitions, worthwhile
from distconv.performance.choice import PartitionPlanner
from distconv.performance.imagined import imagined_job
from distconv.performance.layers import trace
from distconv.performance.machine import read_machine
from distconv.performance.recording import on_meta
from mucudnn.sizes import format_bytes

SIZES = ((128, 1), (256, 4), (512, 32), (1024, 256), (2048, 2048))
"""Voxels along a side, and GPUs: from 256 on each GPU has as many voxels as any other, 161³."""

MACHINE = "h100"
CANDIDATES = 8
ADAM = 2.0
"""Numbers per parameter that the optimizer keeps."""


@dataclass(frozen=True)
class Predicted:
    """A step of one volume under the fastest single partition.

    Attributes:
        size: voxels along a side.
        gpus: that share the volume.
        partition: of every layer.
        seconds: of the step.
        exposed: seconds of it in which a GPU waits for others.
        memory: bytes of a GPU: parameters, gradients, Adam's numbers, and what forward saves.
        fits: whether the GPU has as much.
    """

    size: int
    gpus: int
    partition: str
    seconds: float
    exposed: float
    memory: float
    fits: bool


def predict(size: int, gpus: int) -> Predicted:
    """The fastest single partition of a volume, among the most promising."""
    model, shape, machine = on_meta(UNet), (1, COLOURS, size, size, size), read_machine(MACHINE)
    graph = trace(model, shape)
    found = worthwhile(graph, partitions(gpus, len(shape), ("depth", "height", "width")), CANDIDATES)
    with imagined_job(gpus):
        planner = PartitionPlanner(model, graph, found, machine, states=ADAM)
        plan = planner.uniform()[0]
    memory = plan.memory(ADAM)
    partition = str(next(iter(plan.layers.values())))
    fits = memory <= machine.device.memory
    return Predicted(size, gpus, partition, plan.times.total, plan.times.exposed, memory, fits)


def table(rows: Iterable[Predicted]) -> Table:
    headings = ("voxels", "GPUs", "partition", "ms a step", "of which waiting", "memory of a GPU", "fits")
    cells = [
        (
            f"{row.size:,}³",
            f"{row.gpus:,}",
            row.partition if row.gpus > 1 else "-",
            f"{1e3 * row.seconds:.0f}",
            f"{1e3 * row.exposed:.1f}",
            format_bytes(int(row.memory)),
            "yes" if row.fits else "no",
        )
        for row in rows
    ]
    return Table(f"{read_machine(MACHINE).name}, predicted: one volume a step", headings, cells)
