"""The performance model against published measurements: ResNet-50 on up to 1,024 V100 (ParaDL, arXiv 2104.09075).

    python benchmarks/prediction/clusters.py

One constant, the efficiency of convolutions, is fitted to the time on one GPU; nothing else is. Their implementation,
over ChainerMN, sums all gradients in one message when backward has ended, so nothing of it is hidden here either.
Its batch norm takes each GPU's own statistics, and space is divided by height alone, in four.

Samples divided are compared twice: with the rates that the jobs told, and with the times of their epochs, which the
same logs hold. Several of these jobs ran at the same time and slowed one another down, as their epochs show. So the
third table has the faster half of each job's epochs, and the large jobs that ran beside them.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import nn
from tqdm import tqdm

from benchmarks.table import Table, save, show
from distconv.performance.costs import without
from distconv.performance.events import RecordedStep
from distconv.performance.imagined import imagined_job, mesh_of
from distconv.performance.machine import Machine, read_machine
from distconv.performance.recording import on_meta, record_step
from distconv.performance.replay import message_seconds, replay
from distconv.settings.partition import Partition
from mucudnn.networks.models import NETWORKS

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "paradl_resnet50_v100.csv"
EPOCHS = HERE / "paradl_resnet50_v100_epochs.csv"
RESULT = "clusters"
SAMPLES = 64
"""Of a GPU, or of a group of four that share their samples."""

FASTER, NAMED = "data_faster_epochs", ("data", "spatial4_data")
CURVES = (*NAMED, FASTER)
NAMES = {
    "data": "samples, as the jobs told their rates",
    "spatial4_data": "samples and height in four",
    FASTER: "samples, the faster half of each job's epochs; on average those that no job on 16 GPUs or more ran beside",
}
LARGE = 16
"""GPUs of a job that is named where it ran beside another."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Epoch:
    """One epoch of a job: its steps, and when it began and ended, in seconds since 1970."""

    gpus: int
    steps: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def beside(self, other: Epoch) -> float:
        """Seconds of it in which the other one ran, too."""
        return max(0.0, min(self.ended, other.ended) - max(self.began, other.began))


def _lines(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))


def measurements() -> list[tuple[str, int, float, list[int]]]:
    """(curve, GPUs, steps per second, GPUs of the large jobs that ran beside it), in the order of the curves."""
    rows = _lines(MEASURED)
    told: list[tuple[str, int, float, list[int]]] = [
        (curve, int(row["gpus"]), float(row[curve]), []) for curve in NAMED for row in rows if row[curve]
    ]
    return [*told, *((FASTER, *found) for found in faster_epochs(epochs()))]


def epochs() -> dict[int, list[Epoch]]:
    """Of each job, by its GPUs, all but the first one, in which it also warms up."""
    found: dict[int, list[Epoch]] = {}
    before: dict[int, tuple[int, float]] = {}
    for row in _lines(EPOCHS):
        gpus, steps = int(row["gpus"]), int(row["iterations"])
        ended = datetime.fromisoformat(row["began"]).timestamp() + float(row["seconds"])
        if gpus in before:
            done, began = before[gpus]
            found.setdefault(gpus, []).append(Epoch(gpus, steps - done, began, ended))
        before[gpus] = steps, ended
    return found


def faster_epochs(jobs: Mapping[int, Sequence[Epoch]]) -> list[tuple[int, float, list[int]]]:
    """(GPUs, steps per second in the faster half of the epochs, GPUs of large jobs that ran for half of these)."""
    found = []
    for gpus, mine in jobs.items():
        faster = sorted(mine, key=lambda epoch: epoch.seconds / epoch.steps)[: len(mine) // 2]
        seconds = sum(epoch.seconds for epoch in faster)
        beside = [
            other
            for other, theirs in jobs.items()
            if other not in (gpus, *range(LARGE))
            and sum(epoch.beside(each) for epoch in faster for each in theirs) >= seconds / 2
        ]
        found.append((gpus, sum(epoch.steps for epoch in faster) / seconds, beside))
    return found


def recorded(model: nn.Module, curve: str, gpus: int) -> RecordedStep:
    groups = gpus // 4 if curve == "spatial4_data" else gpus
    partition = Partition((("sample", groups), ("height", gpus // groups)))
    with imagined_job(gpus):
        step = record_step(model, mesh_of(partition), (SAMPLES * groups, 3, 224, 224), batch_norm="local")
    # Running statistics, which distconv gathers in each norm, stay those of each GPU in their programs.
    return without(step, "all_gather")[0]


def seconds(step: RecordedStep, machine: Machine) -> float:
    """A step whose gradients are summed when backward has ended, all in one message, as ChainerMN packs them."""
    rest, gradients = without(step, "gradients")
    alone = replay(rest, machine).total
    if not gradients:
        return alone
    assert len({start.ranks for start in gradients}) == 1, "all ranks hold all parameters"
    packed = replace(gradients[0], bytes=sum(start.bytes for start in gradients))
    return alone + message_seconds(machine, packed, step.rank)


def fitted(machine: Machine, took: Callable[[Machine], float], wanted: float) -> Machine:
    """The machine with the efficiency for which a step takes so many seconds.

    Raises:
        ValueError: where no efficiency does.
    """

    def of(efficiency: float) -> Machine:
        return replace(machine, device=replace(machine.device, efficiency=efficiency))

    low, high = 0.01, 1.0
    if not took(of(high)) <= wanted <= took(of(low)):
        raise ValueError(f"no efficiency from {low} to {high} gives {wanted} s; at the best {took(of(high))} s")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if took(of(middle)) > wanted else (low, middle)
    return of(high)


def compare() -> tuple[Machine, list[Row]]:
    """The fitted machine, and a row for each measurement."""
    model = on_meta(NETWORKS["resnet50"].build)
    rows: list[Row] = []
    machine: Machine = read_machine(str(HERE / "clusters.toml"))
    firsts: dict[str, tuple[float, float]] = {}
    for curve, gpus, measured, beside in tqdm(measurements(), desc="steps"):
        step = recorded(model, curve, gpus)
        if not rows:
            machine = fitted(machine, lambda other, step=step: seconds(step, other), 1 / measured)  # type: ignore[misc]
        predicted = 1 / seconds(step, machine)
        first = firsts.setdefault(curve, (measured, predicted))
        rows.append(
            {
                "curve": curve,
                "gpus": gpus,
                "measured": measured,
                "predicted": predicted,
                "shape": (predicted / first[1]) / (measured / first[0]) - 1,
                "missing": 1 / measured - 1 / predicted,
                "beside": beside,
            }
        )
    return machine, rows


def tables(rows: Sequence[Row]) -> list[Table]:
    found = []
    headings = ("GPUs", "measured steps/s", "predicted", "shape off by %", "missing ms a step")
    for curve in CURVES:
        mine = [row for row in rows if row["curve"] == curve]
        off = [abs(row["shape"]) for row in mine[1:] if not row["beside"]]
        mean, worst = 100 * statistics.mean(off), 100 * max(off)
        title = f"{NAMES[curve]}: shape off by {mean:.0f} % on average, {worst:.0f} % at most"
        cells = [
            (
                str(row["gpus"]),
                f"{row['measured']:.2f}",
                f"{row['predicted']:.2f}",
                f"{100 * row['shape']:+.1f}",
                f"{1e3 * row['missing']:.0f}",
                *([", ".join(map(str, row["beside"])) or "-"] if curve == FASTER else []),
            )
            for row in mine
        ]
        more = ("GPUs of jobs beside",) if curve == FASTER else ()
        found.append(Table(title, (*headings, *more), cells))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{RESULT}.md")
    options = parser.parse_args()
    machine, rows = compare()
    found = tables(rows)
    show(found)
    if options.save:
        efficiency = machine.device.efficiency
        about = (
            f"Predicted for {machine.name}, with an efficiency of {efficiency:.3f}, the one constant that is fitted, to"
            " the first row. A curve's shape is its steps per second over those of its first row; missing is how much"
            " longer a step took than is predicted."
        )
        save(RESULT, "ResNet-50 on V100: predicted, and measured by others", about, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
