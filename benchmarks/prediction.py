"""Training steps predicted by the performance model, against the same steps measured on this machine.

python benchmarks/prediction.py

For 1, 2 and 4 ranks the machine is calibrated, every step is run, and then predicted from kernels that are measured
alone. A step is forward and backward, without loss and optimizer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from benchmarks.prediction_cases import CASES
from benchmarks.table import Table, conditions, save, show
from distconv.partition import Partition
from distconv.performance.imagined import imagined_job, mesh_of
from distconv.performance.kept import Kept
from distconv.performance.kernels import measured_for
from distconv.performance.machine import Machine, read
from distconv.performance.recording import on_meta, record_step
from distconv.performance.replay import replay

RESULT = "prediction-cpu"
RANK = Path(__file__).with_name("prediction_rank.py")


def cases(networks: list[str]) -> Iterator[tuple[str, str]]:
    for name in networks:
        for partition in ("sample=1", *CASES[name].partitions):
            yield name, partition


def run(ranks: int, *arguments: str) -> str:
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    done = subprocess.run(
        [sys.executable, "-m", "distconv", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"distconv {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def machine_of(ranks: int, folder: Path, kept: Kept) -> Machine:
    path = folder / f"{ranks}.toml"
    run(ranks, "calibrate", "--nproc", str(ranks), "-o", str(path))
    return replace(read(str(path)), measured=measured_for(ranks, kept))


def predicted(name: str, partition: str, machine: Machine) -> float:
    case, parsed = CASES[name], Partition.parse(partition)
    with imagined_job(parsed.ranks):
        step = record_step(on_meta(case.build), mesh_of(parsed), case.shape)
    return replay(step, machine).total


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    headings = ("network", "partition", "measured ms", "predicted ms", "error %")
    cells = [
        (
            row["network"],
            row["partition"],
            f"{1e3 * row['measured']:.1f}",
            f"{1e3 * row['predicted']:.1f}",
            f"{100 * row['error']:+.1f}",
        )
        for row in rows
    ]
    errors = [abs(row["error"]) for row in rows]
    worst = max(rows, key=lambda row: abs(row["error"]))
    title = (
        f"{len(rows)} steps: mean error {100 * statistics.mean(errors):.1f} %, "
        f"worst {100 * worst['error']:+.1f} % ({worst['network']}, {worst['partition']})"
    )
    return [Table(title, headings, cells)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CASES, help="a network; may be given more than once")
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{RESULT}.md and .json")
    options = parser.parse_args()
    about = conditions()
    rows, machines = [], {}
    with tempfile.TemporaryDirectory() as folder:
        kept = Kept()
        for name, partition in tqdm(list(cases(options.only or list(CASES))), desc="steps"):
            ranks = Partition.parse(partition).ranks
            if ranks not in machines:
                machines[ranks] = machine_of(ranks, Path(folder), kept)
            took = float(run(ranks, "run", "--show-ranks", "--partition", partition, str(RANK), name))
            expected = predicted(name, partition, machines[ranks])
            error = expected / took - 1
            rows.append(
                {"network": name, "partition": partition, "measured": took, "predicted": expected, "error": error}
            )
    found = tables(rows)
    show(found)
    if options.save:
        save(RESULT, "Predicted and measured steps", about, {"conditions": about, "rows": rows}, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
