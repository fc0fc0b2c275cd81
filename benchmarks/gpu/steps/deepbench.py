"""The layers of DeepBench, as long as there is time: benchmarks/gpu/gpu.py in the precision where dividing can win."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.fifteen import Run
from benchmarks.harness import Records

ROOT = Path(__file__).resolve().parents[3]


def measure(run: Run) -> bool:
    command = [sys.executable, str(ROOT / "benchmarks/gpu/gpu.py"), "--part", "layers", "--precision", "tf32"]
    command += ["--policy", "powerOfTwo", "--limits", "8,64,512", "--device", str(run.device)]
    command += ["--seconds", f"{run.left:.0f}", "--results", str(run.folder)]
    command += ["--layers", str(ROOT / "benchmarks/gpu/small.csv")] if run.small else ["--group", "deepbench"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    rows = Records(run.folder / "gpu.jsonl", "key").found
    run.figures.add(
        "layers and directions", len(rows), "", failed=[key for key, row in rows.items() if "failed" in row]
    )
    for key, row in rows.items():
        over = {limit: entry["over"]["stock"] for limit, entry in row.get("limits", {}).items()}
        run.figures.add(
            key, ", ".join(f"{int(limit) >> 20} MiB {ratio}" for limit, ratio in over.items()), "over torch's"
        )
    return code == 0
