"""A 3-D U-Net on volumes of fractals: the same script in one process and on ranks, to a Dice of 0.95.

    python benchmarks/fractal/fractal.py            # both parts; about ten minutes on two cores
    python benchmarks/fractal/fractal.py --only prediction
    python benchmarks/fractal/fractal.py --save     # keeps the figures in benchmarks/results/fractal.*

The task is that of ScaFFold (github.com/LBANN/ScaFFold), LLNL's benchmark: volumes of fractals, found by iterated
function systems, are segmented by category, and what counts is the seconds until the Dice of validation is 0.95,
reading included. The script, `unet.py` beside this file, is ours and for one device. It runs as it is in one process
and under `mpiexec -n RANKS python -m distconv run --shard-data --partition ...`, on the same files.

Training: each arm trains in float32 until the Dice is reached, and four steps in float64 on fewer volumes, where
rounding leaves next to nothing: these losses must be those of one process to 1e-9, or the exit code is 1. In float32
training amplifies rounding from step to step, so that an arm may take more or fewer epochs than another: these
differences are shown.

Prediction: a step of the network with ScaFFold's 64 channels and four poolings on one volume of 128³ to 2,048³ voxels,
on 1 to 2,048 GPUs. Nothing of it is measured: the performance model follows distconv's own rules without data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.fractal import prediction
from benchmarks.table import Table, conditions, save, show
from distconv.job.launcher import mpiexec

RESULT = "fractal"
SCRIPT = Path(__file__).with_name("unet.py")
PARTITIONS = {1: None, 2: "depth=2", 4: "depth=2,height=2"}
"""Of each number of ranks; one process runs without distconv."""

TOLERANCE = 1e-9
"""Relative difference of losses that the rounding of float64 explains."""

FEW = 10
"""Volumes of the arms in float64, whose convolutions are slow: four steps and three volumes of validation."""


@dataclass(frozen=True)
class Run:
    """What a training left.

    Attributes:
        losses: of all steps.
        dice: of validation after each epoch.
        seconds: from the first batch to the end of each epoch.
    """

    losses: list[float]
    dice: list[float]
    seconds: list[float]


@dataclass(frozen=True)
class Arm:
    """A training in float32, and four steps in float64, on a number of ranks."""

    ranks: int
    single: Run
    double: Run


def command(ranks: int) -> list[str]:
    """What runs the script in one process, or on so many ranks."""
    partition = PARTITIONS[ranks]
    if partition is None:
        return [sys.executable, str(SCRIPT)]
    distconv = [sys.executable, "-m", "distconv", "run", "--no-summary", "--shard-data", "--partition", partition]
    return [*mpiexec(ranks), *distconv, str(SCRIPT)]


def train(ranks: int, data: Path, *arguments: str) -> Run:
    """Runs the script on the data; what it prints is shown.

    Raises:
        SystemExit: if it fails.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    print(f"\n== {ranks} rank{'s' if ranks > 1 else ''}: train {' '.join(arguments)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "record.json"
        done = subprocess.run(
            [*command(ranks), "train", str(data), *arguments, "--json", str(kept)], env=environment, check=False
        )
        if done.returncode:
            raise SystemExit(f"fractal: {ranks} ranks ended with exit code {done.returncode}")
        return Run(**json.loads(kept.read_text()))


def write(data: Path, *arguments: str) -> None:
    """Makes the volumes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(SCRIPT), "write", str(data), *arguments], env=environment, check=True)


def losses_differ(one: Run, other: Run) -> float:
    """The largest relative difference of the losses of the steps that both have taken."""
    return max(abs(a - b) / abs(a) for a, b in zip(one.losses, other.losses, strict=False))


def table(title: str, arms: Sequence[Arm], until: float) -> Table:
    """A row for each arm; the first is what the others are compared with."""
    headings = (
        *("", f"seconds to Dice {until:g}", "epochs", "steps", "Dice", "last loss"),
        *("losses off, float32, first epoch", "float32, all epochs", "float64, four steps"),
    )
    first = arms[0]
    each = len(first.single.losses) // len(first.single.dice)
    rows = []
    for arm in arms:
        run, begun = arm.single, Run(arm.single.losses[:each], [], [])
        off = (
            losses_differ(first.single, begun),
            losses_differ(first.single, run),
            losses_differ(first.double, arm.double),
        )
        rows.append(
            (
                "one process" if arm.ranks == 1 else f"{arm.ranks} ranks, {PARTITIONS[arm.ranks]}",
                f"{run.seconds[-1]:.0f}" if run.dice[-1] >= until else "not reached",
                str(len(run.dice)),
                str(len(run.losses)),
                f"{run.dice[-1]:.4f}",
                f"{run.losses[-1]:.4f}",
                *("-" if arm is first else f"{difference:.1e}" for difference in off),
            )
        )
    return Table(title, headings, rows)


def failures(arms: Sequence[Arm], until: float) -> list[str]:
    """What the arms were to show and did not."""
    found = [f"{arm.ranks} ranks: no Dice of {until:g}" for arm in arms if arm.single.dice[-1] < until]
    for arm in arms[1:]:
        if (off := losses_differ(arms[0].double, arm.double)) > TOLERANCE:
            found.append(f"{arm.ranks} ranks: losses in float64 are off by {off:.1e}")
    return found


def keep(before: str, tables: Sequence[Table]) -> None:
    """Writes the results; `before` tells the conditions."""
    _, _, about = __doc__.split("\n\n", 2)
    command = "`python benchmarks/fractal/fractal.py --save`"
    save(RESULT, "Volumes of fractals", f"{command}: {before}\n\n{about.strip()}", tables)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("training", "prediction"), help="one of the parts (default: both)")
    parser.add_argument("--size", type=int, default=32, help="voxels along a side (default %(default)s)")
    parser.add_argument("--volumes", type=int, default=40, help="for training and validation (default %(default)s)")
    parser.add_argument("--until", type=float, default=0.95, help="Dice that ends a training (default %(default)s)")
    parser.add_argument("--save", action="store_true", help=f"keep the figures in benchmarks/results/{RESULT}.*")
    options = parser.parse_args()
    if options.save and options.only:
        parser.error("--save keeps both parts: leave --only out")
    before, tables, arms, rows = conditions(), [], [], []
    if options.only != "prediction":
        with tempfile.TemporaryDirectory() as folder:
            data, few = Path(folder) / "fractals.zarr", Path(folder) / "few.zarr"
            for path, volumes in ((data, options.volumes), (few, FEW)):
                write(path, "--size", str(options.size), "--volumes", str(volumes))
            for ranks in PARTITIONS:
                double = train(ranks, few, "--dtype", "float64", "--epochs", "1")
                arms.append(Arm(ranks, train(ranks, data, "--until", str(options.until)), double))
        title = f"{options.volumes} volumes of {options.size}³ voxels, U-Net of 8 channels and two poolings"
        tables.append(table(title, arms, options.until))
    if options.only != "training":
        rows = [prediction.predict(size, gpus) for size, gpus in prediction.SIZES]
        tables.append(prediction.table(rows))
    show(tables)
    if options.save:
        keep(before, tables)
    unmet = failures(arms, options.until) if arms else []
    for line in unmet:
        print(f"fractal: {line}", file=sys.stderr)
    return int(bool(unmet))


if __name__ == "__main__":
    raise SystemExit(main())
