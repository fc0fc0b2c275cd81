"""benchmarks/gpu/gpu.py on a GPU: one tiny layer, and what mucudnn costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.harness import Records

ROOT = Path(__file__).resolve().parents[2]


# The null card computes on the host: there a small layer counts as a long one.
IS_NULL = "NULL_CARD_CUDNN" in os.environ
LAYER = "8,8,14,14,8,5,5,2,2,1,1" if IS_NULL else "64,32,28,28,64,5,5,2,2,1,1"


def test_a_layer_and_the_costs(cuda: torch.device, tmp_path: Path) -> None:
    table = tmp_path / "tiny.csv"
    headings = "batch,in_channels,height,width,out_channels,kernel_h,kernel_w,pad_h,pad_w,stride_h,stride_w"
    table.write_text(f"{headings}\n{LAYER}\n")
    options = ["--part", "layers", "--part", "costs", "--layers", str(table), "--policy", "powerOfTwo"]
    options += ["--precision", "float32", "--limits", "0,64", "--seconds", "1000" if IS_NULL else "240"]
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu/gpu.py", *options, "--results", str(tmp_path / "results")],
        cwd=ROOT,
        env={**os.environ, "NULL_CARD_SLOWNESS": "2000"},
        capture_output=True,
        text=True,
        timeout=1100 if IS_NULL else 280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4 of 4 units are measured" in done.stderr
    rows = Records(tmp_path / "results" / "gpu.jsonl", "key").found
    assert not [row for row in rows.values() if "failed" in row]
    for key, row in rows.items():
        if key.startswith("layers/"):
            entry = row["limits"][str(64 * 2**20)]
            assert entry["capped"] > 0 and "capped_failed" not in entry
            assert entry["divided"] is None or entry["divided"]["error"] < 1e-4
            assert not IS_NULL or row["launches"] > 1, "nothing was planned"
    assert rows["costs/host"]["part"] > 0
