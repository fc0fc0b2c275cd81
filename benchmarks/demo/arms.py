"""The arms of the demo: how each runs a script, what it leaves, and tables with a column per arm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.table import Table
from mucudnn.reporting.record import Outcome, Record
from mucudnn.sizes import format_bytes

ROOT = Path(__file__).resolve().parents[2]

_PEAK = re.compile(r"peak tensor memory of a step: ([\d.]+) MiB")


def file_name(arm: str) -> str:
    """The name of an arm as part of a file's: "four ranks, divided" is "four-ranks-divided"."""
    return arm.replace(",", "").replace(" ", "-")


@dataclass(frozen=True)
class Run:
    """What one training left.

    Attributes:
        name: of its arm.
        record: what the script wrote with `--json`: losses, seconds per step, Dice.
        plans: what mucudnn chose for each convolution, of rank 0 where there are several; None without mucudnn.
        peaks: MiB of tensors that each rank held at most in a step; empty where the script does not tell.
    """

    name: str
    record: dict[str, Any]
    plans: Sequence[Record] | None
    peaks: tuple[float, ...]

    @property
    def cut(self) -> list[Record]:
        """The convolutions that were divided."""
        return [plan for plan in self.plans or () if plan.is_divided]

    @property
    def seconds(self) -> float:
        """Median seconds of a step."""
        return float(self.record["median_seconds"])


@dataclass(frozen=True)
class Arm:
    """A way to run a script.

    Attributes:
        name: what the tables and files call it.
        command: what stands between python and the script.
        environment: variables that are set for it.
        report: the file that the command writes its plans to; None where mucudnn is not there.
        ranks: processes that train, each of which tells its peak memory if the script does.
    """

    name: str
    command: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    report: Path | None = None
    ranks: int = 1

    def run(self, folder: Path, script: str, *arguments: str) -> Run:
        """Trains; the script's output is shown as it comes, and its files go to the folder.

        Raises:
            SystemExit: if the script fails.
        """
        kept = folder / f"{file_name(self.name)}.json"
        output = self._show([*self.command, script, *arguments, "--json", str(kept)])
        peaks = tuple(float(peak) for peak in _PEAK.findall(output))
        if peaks and len(peaks) != self.ranks:
            raise SystemExit(f"demo: {len(peaks)} of {self.ranks} ranks told their peak memory")
        plans = None if self.report is None else Outcome.from_json(json.loads(self.report.read_text())).records
        return Run(self.name, json.loads(kept.read_text()), plans, peaks)

    def _show(self, command: list[str]) -> str:
        settings = "".join(f"{name}={value} " for name, value in self.environment.items())
        print(f"\n== {self.name}: {settings}python {' '.join(command)}", flush=True)
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(f"   {line}", end="", flush=True)
            lines.append(line)
        if process.wait():
            raise SystemExit(f"demo: {self.name} ended with exit code {process.returncode}")
        return "".join(lines)


def losses_differ(one: Run, other: Run) -> float:
    """The largest relative difference of two runs' losses."""
    pairs = zip(one.record["losses"], other.record["losses"], strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


def tables(title: str, runs: Sequence[Run]) -> list[Table]:
    """The three arms side by side, and what was divided.

    Args:
        runs: plain, undivided and divided; then plain and divided in float64.
    """
    plain, undivided, divided, plain64, divided64 = runs
    arms = plain, undivided, divided
    columns = [_quantities(arm, plain) for arm in arms]
    rows = [(quantity, *(column[quantity] for column in columns)) for quantity in columns[0]]
    rows.append(("the same in float64, first steps", "", "", f"{losses_differ(plain64, divided64):.1e}"))
    rows.append(("convolutions divided in float64", "", "", _share_divided(divided64)))
    found = [Table(title, ("", *(arm.name for arm in arms)), rows)]
    if divided.cut:
        headings = "divided", "direction", "division", "over undivided", "workspace", "undivided it needs"
        found.append(Table(f"{divided.name}: what was cut", headings, [_cut(plan) for plan in divided.cut]))
    return found


def _quantities(run: Run, plain: Run) -> dict[str, str]:
    """A cell per quantity."""
    record = run.record
    workspace = "torch's own" if run.plans is None else format_bytes(max(plan.workspace for plan in run.plans))
    cells = {
        "loss, first step": f"{record['losses'][0]:.6f}",
        "loss, last step": f"{record['losses'][-1]:.6f}",
        **{f"Dice, {name}": f"{value:.4f}" for name, value in record["dice"].items()},
        "seconds per step": f"{run.seconds:.3f}",
        "over plain": f"{plain.seconds / run.seconds:.2f}x",
        "largest workspace": workspace,
        "convolutions divided": _share_divided(run),
    }
    if run.peaks:
        cells["peak tensor memory, MiB"] = ", ".join(f"{peak:.0f}" for peak in run.peaks)
        cells["largest share of one process's memory"] = f"{max(run.peaks) / max(plain.peaks):.3f}"
    cells["largest difference of losses"] = "" if run is plain else f"{losses_differ(plain, run):.1e}"
    return cells


def _share_divided(run: Run) -> str:
    return "-" if run.plans is None else f"{len(run.cut)} of {len(run.plans)}"


def _cut(plan: Record) -> tuple[str, ...]:
    return (
        str(plan.problem),
        plan.direction.replace("_", " "),
        plan.division,
        f"{plan.undivided_seconds / plan.seconds:.2f}x",
        format_bytes(plan.workspace),
        format_bytes(plan.whole_workspace) if plan.whole_workspace else "torch's own",
    )
