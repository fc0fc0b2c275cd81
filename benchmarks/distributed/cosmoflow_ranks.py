"""Trains CosmoFlow on ranks that read volumes from files, and watches how much memory all of them together take.

    python benchmarks/distributed/cosmoflow_ranks.py --folder universes/    # 4 x 128³
    python benchmarks/distributed/cosmoflow_ranks.py --folder universes/ --size 512 --samples 3 \\
        --width 2 --batch 1 --save

Universes that are missing in the folder are written first (4 x 512³: 1 GiB and some minutes each). Then `distconv run
--shard-data` trains `cosmoflow.py`, beside this file, on them. Memory is the sum of the processes' proportional shares
(Pss of /proc/PID/smaps_rollup: what several of them map is counted once), looked at twice a second; cached pages of
files are not in it. Seconds of a step are those of the first epoch, in which the mean and the deviation of every new
sample are found, and of later ones; reading is among them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.distributed import cosmoflow
from benchmarks.table import Table, conditions, save, show

MARK = "DISTCONV_BENCHMARK_RUN"
GIB = 1 << 30


class Watch:
    """The most memory that the processes with a mark in their environment take together, while it is entered."""

    def __init__(self, mark: str) -> None:
        self._mark, self._ended = mark.encode(), threading.Event()
        self.most, self.of_one, self.processes = 0, 0, 0
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.5):
            taken = [size for entry in Path("/proc").glob("[0-9]*") if (size := self._bytes(entry))]
            self.most, self.of_one = max(self.most, sum(taken)), max([self.of_one, *taken])
            self.processes = max(self.processes, len(taken))

    def _bytes(self, entry: Path) -> int:
        try:
            if self._mark not in (entry / "environ").read_bytes():
                return 0
            lines = (entry / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def written(folder: Path, size: int, samples: int) -> Path:
    """A folder of universes of a size, as many as are asked for."""
    own = folder / f"{size}"
    if len(list(own.glob("*.hdf5"))) < samples:
        cosmoflow.write(own, size, samples, 0)
    return own


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Losses, seconds and the most bytes of memory of a job."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        record = Path(name) / "record.json"
        store = ["--store", options.store] if options.store else []
        ranks = ["--partition", options.partition, "--shard-data", *store]
        model = ["--width", f"{options.width}", "--batch", f"{options.batch}", "--epochs", f"{options.epochs}"]
        script = [
            str(ROOT / "benchmarks" / "distributed" / "cosmoflow.py"),
            "train",
            str(folder),
            *model,
            "--json",
            str(record),
        ]
        environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}
        begin = time.perf_counter()
        with Watch(mark) as watch:
            command = [sys.executable, "-m", "distconv", "run", *ranks, *script]
            if subprocess.run(command, env=environment).returncode:
                raise SystemExit(1)
        seconds = time.perf_counter() - begin
        found: dict[str, Any] = json.loads(record.read_text())
    return {**found, "bytes": watch.most, "bytes of one": watch.of_one, "whole": seconds}


def table(options: argparse.Namespace, found: dict[str, Any]) -> Table:
    each = len(found["seconds"]) // options.epochs
    first, later = found["seconds"][:each], found["seconds"][each:]
    volume = options.batch * 4 * options.size**3 * 4 / GIB
    cells = (
        options.partition,
        f"{volume:.2f}",
        f"{found['bytes'] / GIB:.2f}",
        f"{found['bytes of one'] / GIB:.2f}",
        f"{statistics.fmean(first):.1f}",
        f"{statistics.fmean(later):.1f}" if later else "",
        f"{found['whole']:.0f}",
        " ".join(f"{loss:.4f}" for loss in found["losses"]),
    )
    headings = (
        *("partition", "a batch in float32, GiB", "most memory of all ranks, GiB", "of one process, GiB"),
        *("s of a step, first epoch", "later", "s in all", "losses"),
    )
    return Table(f"CosmoFlow of width {options.width} on 4 x {options.size}³", headings, [cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the universes; a folder for each size in it")
    parser.add_argument("--size", type=int, default=128, help="voxels along a side (default %(default)s)")
    parser.add_argument("--samples", type=int, default=5, help="universes (default %(default)s)")
    parser.add_argument("--partition", default="depth=4", help="(default %(default)s)")
    parser.add_argument("--store", default="", help="of distconv run (default: none)")
    parser.add_argument("--width", type=int, default=16, help="filters of the first layer (default %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="universes of a step (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results/cosmoflow-SIZE-*")
    options = parser.parse_args()
    before = conditions()
    found = run(options, written(options.folder, options.size, options.samples))
    result = table(options, found)
    show([result])
    if options.save:
        about = f"{before}\n\n{__doc__.split(chr(10) * 2, 2)[2].strip()}"
        save(f"cosmoflow-{options.size}-cpu", "CosmoFlow read from files by ranks", about, [result])


if __name__ == "__main__":
    main()
