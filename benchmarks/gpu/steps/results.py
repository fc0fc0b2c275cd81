"""The tests that need a GPU, file by file: a sample of results first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.fifteen import Run

ROOT = Path(__file__).resolve().parents[3]

FILES = ("test_results.py", "test_patched.py", "test_memory.py", "test_live.py")


def measure(run: Run) -> bool:
    command = [sys.executable, str(ROOT / "tests/gpu/run.py"), "--device", str(run.device), "--again"]
    command += ["--seconds", f"{run.left:.0f}", "--results", str(run.folder)]
    command += ["test_any.py"] if run.small else [*FILES]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    outcomes = json.loads((run.folder / "gpu-tests.json").read_text())[str(run.device)]
    for name, outcome in outcomes.items():
        run.figures.add(name, outcome["summary"], "", failed=outcome["failed"])
    return code in (0, 1)
