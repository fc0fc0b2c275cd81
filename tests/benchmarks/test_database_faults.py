"""`benchmarks/faults/database_faults.py` in short, and that it notices what is lost and what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.database_rows import compared, key, options
from mucudnn.timing.store import Store

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_is_lost_when_writers_are_killed() -> None:
    command = [sys.executable, ROOT / "benchmarks/faults/database_faults.py", "--kills", "8"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as it should be") >= 6


def test_lost_and_wrong_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "times.sqlite"
    store, rows = Store(str(path)), [(0, 1), (1, 3), (0, 3)]
    for row in rows:
        store.record(key(row), options(row))
    assert compared(path, rows, 2) == (0, 0)
    assert compared(path, [*rows, (1, 5)], 2) == (1, 0)
    store.record(key((0, 1)), [replace(options((0, 1))[0], workspace=1)])
    assert compared(path, rows, 2) == (0, 1)
    store.record(key((0, 2)), [replace(each, seconds=1.0) for each in options((0, 2))])  # told by nobody
    assert compared(path, rows, 2) == (0, 2)
    store.close()
