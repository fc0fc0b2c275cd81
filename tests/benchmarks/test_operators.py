"""The benchmark of operators tells right results from wrong ones, refusals, crashes and hangs: of samples made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import Records
from benchmarks.operators.operators import KEY, counts, tables

ROOT = Path(__file__).resolve().parents[2]

RUN = """
import json, sys, torch, distconv
from torch.distributed.tensor import DTensor
import torch.distributed as dist
from benchmarks import rank_pool
from benchmarks.operators import pool as operator_pool
from benchmarks.operators.pool import Pool
from benchmarks.operators.samples import Sample

operator_pool.ANSWER_SECONDS, rank_pool.GRACE_SECONDS = 20.0, 1.0


def differs(x):
    return x + 1 if isinstance(x, DTensor) else x


def crashes(x):
    if isinstance(x, DTensor):
        raise ValueError("not in one process")
    return x * 1


def waits(x):
    if isinstance(x, DTensor):
        if dist.get_rank():
            raise ValueError("while the other waits")
        dist.barrier()
    return x


class Entry:
    def __init__(self, function):
        self.name, self.function = function.__name__, function

    def samples(self, most):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
        return [Sample(self.function, x, (), {}, lambda result: result, ())][:most]


def right(x):
    return (x.sin(), x.sum(2))


def gathered(x):
    return torch.histc(x.detach(), 3)


def refused(x):
    return x.detach().as_strided_((2, 2), (1, 2))


entries = [Entry(function) for function in (right, gathered, refused, differs, crashes, waits)]
pool = Pool(2, entries, 8, 1 << 20)
found = {}
for index, entry in enumerate(entries):
    assert pool.open(index) == 1
    found[entry.name] = [pool.compare(index, 0, partition)[0] for partition in sys.argv[1:]]
pool.close()
print(json.dumps(found))
"""


def test_outcomes_are_distinguished() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, "height=2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "right": ["right"],
        "gathered": ["gathered"],
        "refused": ["refused"],
        "differs": ["wrong"],
        "crashes": ["crash"],
        "waits": ["hang"],
    }


def record(entry: str, outcome: str) -> dict[str, object]:
    return {"samples": 8, "entry": entry, "sample": 0, "partition": "height=2", "outcome": outcome}


def test_runs_go_on_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    assert Records(path, *KEY).found == {}
    for line in (record("a", "wrong"), record("a", "right"), record("b", "refused")):
        Records(path, *KEY).add(line)
    found = list(Records(path, *KEY).found.values())
    assert counts(found) == {"right": 1, "gathered": 0, "wrong": 0, "refused": 1, "crash": 0, "hang": 0}
    by_partition, unlike = tables(found, ["height=2", "width=2"])
    assert [row[:3] for row in by_partition.rows] == [("height=2", "2", "1"), ("all", "2", "1")]
    assert [row[0] for row in unlike.rows] == ["b"]


def test_torch_has_samples() -> None:
    pytest.importorskip("expecttest")
    from benchmarks.operators.samples import entries

    listed = {entry.name: entry for entry in entries()}
    assert len(listed) > 500
    assert 0 < len(listed["cumsum"].samples(8)) <= 9
