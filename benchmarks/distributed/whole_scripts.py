"""What whole scripts cost on ranks, with small networks: `python benchmarks/distributed/whole_scripts.py`

Every kind of `whole_script.py` runs in plain python and under `distconv run`, in turn. The tables show the processor
time of a step by the script's parts, on the first rank beside plain python, and that of whole runs with their starts,
divided by the ranks; the least of the runs each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.table import Table, show

SCRIPT = Path(__file__).with_name("whole_script.py")
INSIDE = ("model", "backward")
"""The parts that a partition is about; the others are the script's own code."""


def run(kind: str, steps: int, width: int, partition: str | None) -> tuple[dict[str, float], float]:
    """Processor ms of a step by part, and processor seconds of the whole run with all its processes."""
    command = [sys.executable, *(("-m", "distconv", "run", "--partition", partition) if partition else ())]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, str(SCRIPT), kind, f"--steps={steps}", f"--width={width}"],
        env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(SCRIPT.parents[1])),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{kind} under {partition or 'plain python'}: exit code {done.returncode}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("PARTS "))
    parts: dict[str, float] = json.loads(line.removeprefix("PARTS "))
    return parts, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of each run (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of each kind and way, in turn (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="channels of the networks (%(default)s)")
    parser.add_argument("--partition", default="sample=2,height=2", help="(%(default)s)")
    parser.add_argument("--kinds", nargs="*", default=["classifier", "segmenter", "volumes"], help="(all)")
    options = parser.parse_args()
    ranks = 1
    for axis in options.partition.split(","):
        ranks *= int(axis.partition("=")[2])
    tables, whole = [], []
    for kind in options.kinds:
        pairs = [
            [run(kind, options.steps, options.width, way) for way in (None, options.partition)]
            for _ in range(options.runs)
        ]
        ways = [[pair[way] for pair in pairs] for way in range(2)]
        least = [{name: min(parts[name] for parts, _ in way) for name in way[0][0]} for way in ways]
        for parts in least:
            before = parts.pop("before")
            parts["own code, together"] = sum(ms for name, ms in parts.items() if name not in INSIDE)
            parts["until the script begins"] = before
        rows = [
            (name, f"{least[0][name]:.2f}", f"{least[1][name]:.2f}", f"{least[1][name] / least[0][name]:.2f}")
            for name in least[0]
        ]
        tables.append(Table(f"{kind}: processor ms of a step", ("part", "plain", "on ranks", "ratio"), rows))
        plain, distributed = (min(seconds for _, seconds in way) for way in ways)
        whole.append((kind, f"{plain:.2f}", f"{distributed / ranks:.2f}", f"{distributed / ranks / plain:.2f}"))
    headings = ("script", "plain, s", f"{options.partition}, s a rank", "ratio")
    show([*tables, Table("Processor time of whole runs", headings, whole)])


if __name__ == "__main__":
    main()
