"""Runs the brain scripts as they are and beneath mucudnn and distconv, and shows both side by side.

    python benchmarks/demo.py                  # both parts; pictures and records go to demo/
    python benchmarks/demo.py --only slices    # mucudnn: 31x31 kernels within 64 MiB of workspace
    python benchmarks/demo.py --only volume    # distconv above mucudnn: a 3-D U-Net on four ranks

Each part also trains a few steps in float64, where rounding leaves next to nothing: these losses must agree to 1e-9,
or the exit code is 1. In float32, training amplifies rounding from step to step: that difference is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mucudnn.reporting.run_file import Outcome
from mucudnn.reporting.tables import table

LIMIT = "64MiB"
PARTITION = "depth=2,height=2"

SIZE = "40x48x40"
"""Voxels of the volume: 4 mm each way."""

EXACT = ("--dtype", "float64", "--steps", "4")
"""Arguments of the runs whose losses must agree."""

TOLERANCE = 1e-9
"""Relative difference of losses that the rounding of float64 explains."""


def run(title: str, command: list[str], **environment: str) -> str:
    """Runs python on the command, its output shown as it comes.

    Returns:
        The output.
    """
    print(f"\n== {title}: python {' '.join(command)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(f"   {line}", end="", flush=True)
        lines.append(line)
    if process.wait():
        raise SystemExit(f"demo: {title} ended with exit code {process.returncode}")
    return "".join(lines)


def difference(one: list[float], other: list[float]) -> float:
    """The largest relative difference of two sequences of losses."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def side_by_side(title: str, columns: dict[str, dict[str, Any]]) -> Table:
    """A table with a row per quantity."""
    shown = Table("", *columns, title=title)
    for quantity in next(iter(columns.values())):
        shown.add_row(quantity, *(str(column[quantity]) for column in columns.values()))
    return shown


def quantities(record: dict[str, Any], **more: str) -> dict[str, Any]:
    """What both parts show of a run's record."""
    return {
        "loss, first step": f"{record['losses'][0]:.6f}",
        "loss, last step": f"{record['losses'][-1]:.6f}",
        **{f"Dice, {name}": f"{value:.4f}" for name, value in record["dice"].items()},
        "seconds per step": f"{record['median_seconds']:.3f}",
        **more,
    }


def losses(record: Path) -> list[float]:
    """The losses that a script wrote with `--json`."""
    values: list[float] = json.loads(record.read_text())["losses"]
    return values


def compare(shown: Table, float32: float, float64: float) -> None:
    """Adds rows with the largest differences of losses."""
    shown.add_row("largest difference of losses", "", f"{float32:.1e}")
    shown.add_row("the same in float64, first steps", "", f"{float64:.1e}")


def slices(folder: Path, console: Console) -> bool:
    """Large kernels on slices, plain and within a workspace limit. Returns whether the losses are the same."""
    script = "benchmarks/brain_slices.py"
    plain_json, limited_json, plans = folder / "plain.json", folder / "limited.json", folder / "plans.json"
    run("plain", [script, "--json", str(plain_json)])
    mucudnn = ["-m", "mucudnn", "run", "--workspace-limit", LIMIT, "--database", str(folder / "times.sqlite")]
    arguments = ["--json", str(limited_json), "--picture", str(folder / "slices.png")]
    run(f"mucudnn, {LIMIT}", [*mucudnn, "--report", str(plans), script, *arguments])
    exact = folder / "plain64.json", folder / "limited64.json"
    run("plain, float64", [script, *EXACT, "--json", str(exact[0])])
    run(f"mucudnn, {LIMIT}, float64", [*mucudnn, script, *EXACT, "--json", str(exact[1])])

    plain, limited = json.loads(plain_json.read_text()), json.loads(limited_json.read_text())
    records = Outcome.from_json(json.loads(plans.read_text())).records
    workspace = max(record.workspace for record in records)
    worst = difference(*map(losses, exact))
    shown = side_by_side(
        "31x31 kernels on axial slices",
        {
            "plain": quantities(plain, **{"largest workspace": "torch's own"}),
            f"mucudnn, {LIMIT}": quantities(limited, **{"largest workspace": f"{workspace / 2**20:.1f} MiB"}),
        },
    )
    shown.add_section()
    shown.add_row("speed-up", "", f"{plain['median_seconds'] / limited['median_seconds']:.1f}x")
    compare(shown, difference(plain["losses"], limited["losses"]), worst)
    console.print(table(records))
    console.print(shown)
    return worst <= TOLERANCE


def volume(folder: Path, console: Console) -> bool:
    """A 3-D U-Net on one process and on four ranks. Returns whether the losses are the same."""
    script = "benchmarks/brain_volume.py"
    one_json, four_json, weights = folder / "one.json", folder / "four.json", folder / "weights.pt"
    exact = folder / "one64.json", folder / "four64.json"
    distconv = ["-m", "distconv", "run", "--partition", PARTITION]
    environment = {
        "OMP_NUM_THREADS": "1",
        "MUCUDNN_WORKSPACE_LIMIT": LIMIT,
        "MUCUDNN_DATABASE": str(folder / "times.sqlite"),
    }
    title = f"four ranks, {PARTITION}, mucudnn within {LIMIT}"
    run("one process", [script, "--size", SIZE, "--json", str(one_json)], OMP_NUM_THREADS="1")
    arguments = ["--size", SIZE, "--json", str(four_json), "--save", str(weights)]
    output = run(title, [*distconv, "--print-all-ranks", script, *arguments], **environment)
    run("one process, float64", [script, "--size", SIZE, *EXACT, "--json", str(exact[0])], OMP_NUM_THREADS="1")
    run(f"{title}, float64", [*distconv, script, "--size", SIZE, *EXACT, "--json", str(exact[1])], **environment)
    picture = str(folder / "volume.png")
    run("picture", [script, "--size", SIZE, "--load", str(weights), "--steps", "0", "--picture", picture])

    one, four = json.loads(one_json.read_text()), json.loads(four_json.read_text())
    peaks = [float(peak) for peak in re.findall(r"peak tensor memory of a step: ([\d.]+) MiB", output)]
    if len(peaks) != 4:
        raise SystemExit(f"demo: {len(peaks)} of 4 ranks told their peak memory")
    whole = one["peak_tensor_bytes"] / 2**20
    worst = difference(*map(losses, exact))
    shares = ", ".join(f"{peak:.0f}" for peak in peaks)
    shown = side_by_side(
        "3-D U-Net on the whole volume",
        {
            "one process": quantities(one, **{"peak tensor memory, MiB": f"{whole:.0f}"}),
            f"four ranks, {PARTITION}": quantities(four, **{"peak tensor memory, MiB": shares}),
        },
    )
    shown.add_section()
    shown.add_row("largest share of one process's memory", "", f"{max(peaks) / whole:.3f}")
    compare(shown, difference(one["losses"], four["losses"]), worst)
    console.print(shown)
    return worst <= TOLERANCE


PARTS = {"slices": slices, "volume": volume}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*PARTS], action="append", help="a part; may be repeated")
    parser.add_argument("--folder", type=Path, default=ROOT / "demo", help="where files go (default: demo/)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 130)
    same = [PARTS[part](options.folder.resolve(), console) for part in options.only or PARTS]
    print(f"pictures and records: {options.folder}")
    if not all(same):
        print(f"demo: losses in float64 differ by more than {TOLERANCE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
