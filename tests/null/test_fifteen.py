"""benchmarks/gpu/fifteen.py, tried with small sizes: every step comes to its end, behind planted faults, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.fifteen import DONE, REST, STEPS
from benchmarks.gpu.figures import read

ROOT = Path(__file__).resolve().parents[2]

ABSENT = {"a small compiled model against eager", "NCCL allreduce with one rank"}
"""What fails on the null card, which runs no kernels of Triton and NCCL; the figures say so."""


@pytest.mark.usefixtures("card")
def test_every_step_comes_to_its_end(tmp_path: Path) -> None:
    command = [sys.executable, "tests/benchmarks/planted/fifteen.py", "--small", "--patience", "10"]
    command += ["--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]
    only = [option for name in ("crash", "hang", *STEPS) for option in ("--only", name)]
    first = subprocess.run([*command, *only], cwd=ROOT, capture_output=True, text=True, check=False)
    assert first.returncode == 1, first.stdout + first.stderr
    environment = {**os.environ, "NULL_CARD_CONVOLUTIONS": "0"}  # whose layers would take minutes
    second = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    # The second run repeats what has failed, and goes on: what is done is not begun again.
    assert [line.split(": ")[1] for line in second.stdout.splitlines()[:-1]] == ["crash", "hang", *REST], second.stderr
    states = {name: of["state"] for name, of in json.loads((tmp_path / "state/state.json").read_text()).items()}
    assert states.pop("crash").startswith("failed: signal SIGSEGV") and states.pop("hang").startswith("killed after")
    assert states == dict.fromkeys((*STEPS, *REST), DONE), first.stdout + second.stdout
    page = (tmp_path / "out/summary.md").read_text()
    assert (
        "| crash | failed" in page
        and "| hang | killed" in page
        and all(f"| {name} | done |" in page for name in states)
    )
    figures = read(tmp_path / "state/figures.jsonl")
    values = {entry["name"]: str(entry["value"]) for entries in figures.values() for entry in entries}
    assert not Path(f"/proc/{values['before the hang']}").exists()
    assert {name for name, value in values.items() if "failed" in value} == ABSENT
    assert not {name: value for name, value in values.items() if "wrong" in value or "NOT" in value}
    assert values["engines as listed without a card"].startswith("equal")
    assert values["a CUDA graph of ResNet-18 against eager"] == "bit-equal"
    assert float(values["losses of two ranks against one process"]) < 1e-12
