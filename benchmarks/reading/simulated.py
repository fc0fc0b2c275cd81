"""CosmoFlow on 2,048 ranks, simulated: what reading costs with and without spatial reads and a store.

    python benchmarks/reading/simulated.py
    python benchmarks/reading/simulated.py --file-system 100,1000 --save

A step on samples of 512³ voxels, four channels of 16 bits in the file, is recorded and laid in time on the machine
`lassen` (`distconv simulate`). Beside it lies the reading of the next batch: the file system's bandwidth is shared by
all ranks, a node's adapter by its ranks; no cache is counted on. With a store, batches of later epochs travel between
ranks that keep them. An epoch is the least that hides one behind the other. Nothing here is measured on such a machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.reading.seconds import GB, Job, file_seconds, step_seconds, store_seconds
from benchmarks.table import Table, save, show
from distconv.performance.imagined import imagined_job, mesh_of
from distconv.performance.machine import read_machine
from distconv.performance.recording import record_step
from distconv.performance.replay import replay
from distconv.settings.partition import Partition
from mucudnn.networks.models import CosmoFlow

RESULT = "reading-simulated"
RANKS, SIZE, CHANNELS, SAMPLES = 2048, 512, 4, 10_000
SAMPLE_BYTES = 2.0 * CHANNELS * SIZE**3
PARTITIONS = ("sample=64,depth=8,height=4", "sample=128,depth=4,height=2,width=2", "sample=512,depth=4")
NO_PARTS, PARTS, STORE = (
    "whole samples on every rank",
    "each rank its slabs",
    "a store: epochs after the first",
)


def times(partition: str, bandwidths: list[float], size: int = SIZE) -> list[dict[str, Any]]:
    """Seconds of a step and of an epoch for each way of reading, with one sample for each group in a batch."""
    parsed, machine = Partition.parse(partition), read_machine("lassen")
    groups = dict(parsed.axes)["sample"]
    with imagined_job(parsed.ranks):
        with torch.device("meta"):
            model = CosmoFlow(size, CHANNELS)
        step = record_step(model, mesh_of(parsed), (groups, CHANNELS, size, size, size), batch_norm="global")
    compute = replay(step, machine).total
    job = Job(parsed.ranks, groups, groups, SAMPLE_BYTES * (size / SIZE) ** 3)
    found = []
    for bandwidth in bandwidths:
        reading = {
            NO_PARTS: file_seconds(job, machine, bandwidth * GB, parts=False),
            PARTS: file_seconds(job, machine, bandwidth * GB, parts=True),
            STORE: store_seconds(job, machine),
        }
        for way, seconds in reading.items():
            whole = step_seconds(compute, seconds)
            found.append(
                {
                    "partition": partition,
                    "file system": bandwidth,
                    "way": way,
                    "compute": compute,
                    "reading": seconds,
                    "step": whole,
                    "epoch": whole * SAMPLES / groups,
                }
            )
    return found


def table(found: list[dict[str, Any]]) -> Table:
    cells = []
    for row in found:
        cells.append(
            (
                row["partition"],
                "none" if row["way"] == STORE else f"{row['file system']:g}",
                row["way"],
                *(f"{1e3 * row[what]:.1f}" for what in ("compute", "reading", "step")),
                f"{row['epoch']:.0f}",
            )
        )
    headings = (
        *("partition", "file system, GB/s", "read", "step, ms", "reading, ms", "the longer, ms"),
        f"epoch of {SAMPLES:,} samples, s",
    )
    return Table(f"CosmoFlow, {SIZE}³, {RANKS:,} ranks, simulated", headings, list(dict.fromkeys(cells)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file-system", default="100,500", metavar="GB/S,...", help="bandwidths (default %(default)s)")
    parser.add_argument("--save", action="store_true", help=f"keep the figures in benchmarks/results/{RESULT}.*")
    options = parser.parse_args()
    try:
        bandwidths = [float(text) for text in options.file_system.split(",")]
        if min(bandwidths) <= 0:
            raise ValueError
    except ValueError:
        parser.error(f"--file-system {options.file_system}: accepted: gigabytes per second above 0, as 100,500")
    found = [row for partition in PARTITIONS for row in times(partition, bandwidths)]
    shown = table(found)
    show([shown])
    if options.save:
        about = (__doc__ or "").split("\n\n", 2)[2].strip()
        save(RESULT, "Reading on 2,048 ranks, simulated", about, [shown])


if __name__ == "__main__":
    main()
