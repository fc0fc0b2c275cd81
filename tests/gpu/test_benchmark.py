"""benchmarks/gpu/gpu.py on a GPU: one tiny layer, and what mucudnn costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def test_a_layer_and_the_costs(cuda: torch.device, tmp_path: Path) -> None:
    table = tmp_path / "tiny.csv"
    headings = "batch,in_channels,height,width,out_channels,kernel_h,kernel_w,pad_h,pad_w,stride_h,stride_w"
    table.write_text(f"{headings}\n64,32,28,28,64,5,5,2,2,1,1\n")
    options = ["--part", "layers", "--part", "costs", "--layers", str(table), "--policy", "powerOfTwo"]
    options += [
        "--precision",
        "float32",
        "--limits",
        "0,64",
        "--seconds",
        "240",
        "--results",
        str(tmp_path / "results"),
    ]
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu/gpu.py", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4 of 4 units are measured" in done.stderr
    rows = json.loads((tmp_path / "results" / "gpu.json").read_text())["rows"]
    assert not [row for row in rows.values() if "failed" in row]
    for key, row in rows.items():
        if key.startswith("layers/"):
            entry = row["limits"][str(64 * 2**20)]
            assert entry["capped"] > 0 and "capped_failed" not in entry
            assert entry["divided"] is None or entry["divided"]["error"] < 1e-4
    assert rows["costs/host"]["part"] > 0
