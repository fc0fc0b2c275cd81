"""The benchmark of limits of memory: what counts, and its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fitting import fits

COUNTED = """
import ctypes, json, torch
counter = ctypes.CDLL(None)
counter.counted_now.restype = counter.counted_most.restype = ctypes.c_long
before = counter.counted_now()
counter.count_anew()
x = torch.zeros(1 << 20)
y = torch.zeros(1 << 18)
del x
print(json.dumps([counter.counted_now() - before, counter.counted_most() - before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the counter replaces functions of glibc")
def test_blocks_are_counted(tmp_path: Path) -> None:
    counter = tmp_path / "allocations.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", counter, fits.HERE / "allocations.c"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", COUNTED],
        env={**os.environ, "LD_PRELOAD": str(counter)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [1 << 20, 5 << 20]


def test_a_row_has_times_and_what_they_take() -> None:
    ways = {
        "plain": {"first": 2.0, "seconds": 1.0, "bytes": 2 << 20, "error": 0.0},
        "--memory": {"first": 4.0, "seconds": 1.5, "bytes": 1 << 20, "error": 1e-9},
        "checkpoints": {"failed": "RuntimeError: no"},
    }
    record = {"network": "net", "share": 0.5, "limit": 1 << 20, "whole": 2 << 20, "ways": ways}
    record["predicted"] = fits.predicted(
        "x\ndistconv: --memory 1MiB: Net runs whole: at most 819.2 KiB (2.0 MiB whole), about 1.50 times the time\n"
    )
    (row,) = fits.rows([record])
    assert row == ("net, 0.5", "2 MiB", "1.50 (1.00)", "failed", "-", "-", "-", "1.25", "2.5 s", "1e-09")
