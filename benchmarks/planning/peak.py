"""How much of the gain of unlimited workspace costs no memory: a training script with and without peak-neutral budgets.

    python benchmarks/planning/peak.py                              # benchmarks/demo/brain_slices.py, three ways
    python benchmarks/planning/peak.py --rounds 3 -- --steps 20 --batch 16

The script runs as it is ("stock"), with an unlimited workspace, and with `--workspace-limit peak`, each in a process of
its own, in turn, round after round. Shown are the median seconds of a step once all plans are made, the peak memory of
tensors in such a step (torch's memory profiler, in a run of its own for each arm), and the share of the gain:
(stock - peak) / (stock - unlimited).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.table import Table, conditions, save, show

RESULT = "peak-cpu"
SCRIPT = "benchmarks/demo/brain_slices.py"
ARMS = {"stock": "0", "unlimited": "unlimited", "peak": "peak"}
"""Workspace limits: 0 leaves every convolution to torch."""

SETTLED = 8
"""Steps after which a run has recorded its memory and made its plans."""

MEASURE = """
import runpy, sys
import torch

class Measured(torch.optim.AdamW):
    # Step by step, from one update to the next, once plans are made.
    def step(self, *arguments, **named):
        result = super().step(*arguments, **named)
        Measured.count = getattr(Measured, "count", 0) + 1
        if Measured.count == SETTLED:
            Measured.memory = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            )
            Measured.memory.__enter__()
        elif Measured.count == SETTLED + 3:
            Measured.memory.__exit__(None, None, None)
            totals = []
            def walk(events):
                for event in events:
                    if event.tag.name == "Allocation":
                        totals.append(event.extra_fields.total_allocated)
                    walk(event.children)
            walk(Measured.memory.profiler.kineto_results.experimental_event_tree())
            print("peak", max(totals), flush=True)
        return result

torch.optim.AdamW = Measured
sys.argv = sys.argv[1:]
sys.path.insert(0, "benchmarks/demo")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(arm: str, database: Path, record: Path, own: list[str], measure: bool = False) -> str:
    """Runs the script under one arm and returns what it prints."""
    script = [SCRIPT]
    if measure:
        program = record.with_suffix(".py")
        program.write_text(MEASURE.replace("SETTLED", str(SETTLED)))
        script = [str(program), SCRIPT]
    options = [
        "--workspace-limit",
        ARMS[arm],
        "--database",
        str(database),
        "--planning",
        "ahead",
        "--report",
        str(record.with_suffix(".plans")),
    ]
    command = [sys.executable, "-m", "mucudnn", "run", *options, *script, *own, "--json", str(record)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "99"}
    finished = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if finished.returncode:
        raise SystemExit(f"peak: the {arm} run ended with exit code {finished.returncode}")
    return finished.stdout


def peak_bytes(output: str) -> int:
    """The peak that a measured run has printed."""
    return next(int(line.split()[1]) for line in output.splitlines() if line.startswith("peak "))


def table(seconds: dict[str, float], peaks: dict[str, int], workspaces: dict[str, int]) -> Table:
    """A row per arm."""
    gain = seconds["stock"] - seconds["unlimited"]
    cells = [
        (
            arm,
            f"{1e3 * seconds[arm]:.1f}",
            f"{seconds['stock'] / seconds[arm]:.2f}x",
            f"{(seconds['stock'] - seconds[arm]) / gain:.1%}" if gain > 0 else "-",
            f"{peaks[arm] / 2**20:.2f}",
            f"{peaks[arm] - peaks['stock']:+d}",
            f"{workspaces[arm] / 2**20:.2f}",
        )
        for arm in ARMS
    ]
    memory = "peak, MiB", "rise, bytes", "largest workspace, MiB"
    headings = "workspace limit", "ms per step", "over stock", "share of the gain", *memory
    return Table(f"{SCRIPT}: what a workspace gains, and what it costs", headings, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each arm (default %(default)s)")
    parser.add_argument("--database", type=Path, help="of times, to be kept (default: a temporary one)")
    parser.add_argument("--save", action="store_true", help=f"keep the figures in benchmarks/results/{RESULT}.*")
    parser.add_argument("own", nargs="*", help="arguments of the script, after --")
    options = parser.parse_args()
    before = conditions()
    own = options.own or ["--steps", str(SETTLED + 12)]
    with tempfile.TemporaryDirectory() as folder:
        database, record = options.database or Path(folder) / "times.sqlite", Path(folder) / "record.json"
        peaks, workspaces, seconds = {}, {}, {}
        for arm in ARMS:  # each arm measures here what the timed runs below then find in the database
            peaks[arm] = peak_bytes(run(arm, database, record, own, measure=True))
            plans: dict[str, Any] = json.loads(record.with_suffix(".plans").read_text())
            workspaces[arm] = max((plan["workspace"] for plan in plans["plans"]), default=0)
        steps: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for _ in range(options.rounds):
            for arm in ARMS:
                run(arm, database, record, own)
                steps[arm].append(statistics.median(json.loads(record.read_text())["seconds"][SETTLED:]))
        seconds = {arm: statistics.median(found) for arm, found in steps.items()}
    shown = table(seconds, peaks, workspaces)
    show([shown])
    if options.save:
        about = f"`python benchmarks/planning/peak.py --rounds {options.rounds} -- {' '.join(own)}`: {before}"
        save(RESULT, "Workspace that does not raise the peak, on a CPU", about, [shown])


if __name__ == "__main__":
    main()
