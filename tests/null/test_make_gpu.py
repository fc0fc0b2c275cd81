"""What `make gpu` runs, tried with small sizes: every script comes to its end, and its results are read again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, *command)
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.usefixtures("card")
def test_everything_comes_to_its_end(tmp_path: Path) -> None:
    everything = ["benchmarks/gpu/everything.py", "--small", "--seconds", "1100", "--results", str(tmp_path)]
    # Convolutions would take most of the time. As they are not computed, the file of tests fails, and that is told.
    done = run(*everything, environment={"NULL_CARD_CONVOLUTIONS": "0"})
    assert done.stderr.splitlines()[-1] == "everything.py: everything is done; failed: tests", done.stderr
    assert done.returncode == 1

    (answers,) = tmp_path.glob("first-contact-*.json")
    entries = json.loads(answers.read_text())["entries"]
    assert len(entries) == 11
    # The card has no older functions; another question without an answer would stop a first hour.
    assert [name for name, entry in entries.items() if entry["failed"]] == ["older"]
    assert answers.with_suffix(".md").read_text().count("\n| ") == 1 + 1 + 11
    (outcomes,) = json.loads((tmp_path / "gpu-tests.json").read_text()).values()
    assert {name: one["summary"].split(" in ")[0] for name, one in outcomes.items()} == {"test_any.py": "1 failed"}

    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {key.rpartition("/")[0] for key in rows} >= {"costs", "iterations/alexnet-small/float32"}
    assert len(rows) == 1 + 2 + 3 and not [row for row in rows.values() if "failed" in row or row.get("failures")]
    assert [key for key, row in rows.items() if key.startswith("layers/") and row["launches"] > 1]
    page = (tmp_path / "gpu.md").read_text()
    shown = run("benchmarks/gpu/gpu.py", "--tables", "--results", str(tmp_path), environment={})
    assert shown.returncode == 0, shown.stderr
    for title in ("Layers: speed of the divided plan", "Training steps", "What mucudnn itself costs"):
        assert title in page and title in shown.stdout
    assert (tmp_path / "gpu-times.sqlite").stat().st_size > 0
