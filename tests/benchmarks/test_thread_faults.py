"""`benchmarks/faults/thread_faults.py` in short, and that it notices what hangs and what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.faults import thread_faults

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_hangs_and_nothing_is_wrong() -> None:
    command = [sys.executable, ROOT / "benchmarks/faults/thread_faults.py", "--runs", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda *_: time.sleep(60), thread_faults.HANGS),
        (lambda *_: "a weight differs", "a weight differs"),
        (lambda *_: 1 // 0, "it ended early"),
        (lambda *_: "", ""),
    ],
    ids=["hangs", "wrong", "raises", "right"],
)
def test_how_a_run_ends_is_noticed(run: object, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_faults, "run", run)
    assert thread_faults.outcome(0, [], [], 2 if told == thread_faults.HANGS else 60)[0] == told
