"""Strong scaling to 2,048 GPUs, simulated: samples divided, the best single partition, the best one for each layer.

    python benchmarks/distributed/scaling.py --save                        # all, about six minutes on one core
    python benchmarks/distributed/scaling.py --only cosmoflow --ranks 4,256,2048

Nothing is measured: a step is recorded from distconv's own rules on tensors without data, and its kernels and messages
take what a machine file says. A plan must fit a GPU's memory: parameters, gradients, momentum, and what forward saves.
What is saved is kept for each network, and `--only` replaces its rows alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import nn
from tqdm import tqdm

from benchmarks.distributed.scaling_tables import RESULT, save_rows, tables
from benchmarks.table import RESULTS, show
from distconv.performance.candidates import partitions, worthwhile
from distconv.performance.choice import PartitionPlanner, StepPlan
from distconv.performance.imagined import imagined_job
from distconv.performance.layers import trace
from distconv.performance.machine import Machine, read_machine
from distconv.performance.recording import on_meta
from distconv.performance.recordings import Recordings
from distconv.settings.partition import Partition
from mucudnn.networks.models import CosmoFlow, MeshTangling, ResNet, UNet3d
from mucudnn.optimizer import DoesNotFit

MACHINES = ("lassen", "h100")
RANKS = (4, 16, 64, 256, 1024, 2048)
BATCH_NORM = "local"
"""Statistics over each rank's part of the batch: over all of it, every norm would wait for all ranks, twice a step."""

CANDIDATES = 6
"""Partitions that each layer may have, beside the one of samples alone."""

PROMISING = 4
"""Single partitions of which whole steps are recorded, beside the one of samples."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A network, and the batch that all GPUs share.

    Attributes:
        build: makes the model.
        input: the shape of a sample.
        batch: samples of a step.
    """

    build: Callable[[], nn.Module]
    input: tuple[int, ...]
    batch: int


CASES = {
    **{
        f"resnet50-{width}": Case(lambda width=width: ResNet(50, width_factor=width), (3, 224, 224), 256)  # type: ignore[misc]
        for width in (1, 2, 3, 4)
    },
    "meshtangling1k": Case(lambda: MeshTangling(per_block=3), (18, 1024, 1024), 32),
    "meshtangling2k": Case(lambda: MeshTangling(per_block=5), (18, 2048, 2048), 16),
    "cosmoflow512": Case(lambda: CosmoFlow(size=512), (4, 512, 512, 512), 64),
    "unet256": Case(UNet3d, (1, 256, 256, 256), 16),
}
"""ResNet-50 with its 3x3 convolutions 1 to 4 times as wide, and the networks of the papers at their full sizes."""


def simulate(name: str, ranks: int) -> list[Row]:
    """A row for each machine."""
    case = CASES[name]
    shape = (case.batch, *case.input)
    model = on_meta(case.build)
    graph = trace(model, shape)
    found = worthwhile(graph, partitions(ranks, len(shape)), CANDIDATES)
    samples = Partition((("sample", ranks),))
    if ranks <= case.batch and samples not in found:
        found = [samples, *found]
    with imagined_job(ranks):
        recordings = Recordings(model, graph, BATCH_NORM)
        return [
            {"network": name, "ranks": ranks, "batch": case.batch, **_planned(found, read_machine(machine), recordings)}
            | {"machine": machine}
            for machine in MACHINES
        ]


def _planned(found: Sequence[Partition], machine: Machine, recordings: Recordings) -> Row:
    planner = PartitionPlanner(recordings.model, recordings.graph, found, machine, recordings=recordings)
    limit = machine.device.memory
    single = planner.uniform(PROMISING)
    alone = f"sample={found[0].ranks}"
    samples = next((plan for plan in single if set(map(str, plan.layers.values())) == {alone}), None)
    fitting = [plan for plan in single if plan.memory(planner.states) <= limit]
    try:
        best: StepPlan | None = planner.best(limit)
    except DoesNotFit:
        best = None
    return {
        "samples": _row(samples, planner, limit),
        "single": _row(fitting[0] if fitting else None, planner, limit),
        "strategy": _row(best, planner, limit),
    }


def _partitions(plan: StepPlan, planner: PartitionPlanner) -> list[str]:
    """With the channel algorithms of layers that take another one than moves least."""
    return sorted({planner.text(name, partition) for name, partition in plan.layers.items()})


def _row(plan: StepPlan | None, planner: PartitionPlanner, limit: float) -> Row | None:
    """What a plan takes; None where there is none."""
    if plan is None:
        return None
    memory = plan.memory(planner.states)
    return {
        "partitions": _partitions(plan, planner),
        "seconds": plan.times.total,
        "compute": plan.times.compute,
        "exposed": plan.times.exposed,
        "gradients": plan.times.messages.get("gradients", 0.0),
        "memory": memory,
        "fits": memory <= limit,
        "gap": plan.gap,
    }


def kept() -> list[Row]:
    """What has been saved before."""
    path = RESULTS / f"{RESULT}.json"
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,...", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--ranks", metavar="N,...", help=f"numbers of GPUs (default: {','.join(map(str, RANKS))})")
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{RESULT}.md and .json")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CASES)
    for name in names:
        if name not in CASES:
            parser.error(f"--only {name}: accepted: {', '.join(CASES)}")
    counts = RANKS if options.ranks is None else [int(text) for text in options.ranks.split(",")]
    rows: list[Row] = []
    for name, ranks in tqdm([(name, ranks) for name in names for ranks in counts], desc="plans"):
        rows += simulate(name, ranks)
        if options.save:
            order = {name: at for at, name in enumerate(CASES)}
            done = {(row["network"], row["ranks"]) for row in rows}
            others = [row for row in kept() if (row["network"], row["ranks"]) not in done]
            save_rows(sorted([*others, *rows], key=lambda row: (row["machine"], order[row["network"]], row["ranks"])))
    show(tables(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
