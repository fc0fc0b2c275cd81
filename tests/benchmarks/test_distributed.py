"""The cheapest parts of benchmarks/distributed/distributed.py on two real ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.distributed.distributed import tables
from tests.forked_python import run_python

ROOT = Path(__file__).resolve().parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return run_python("benchmarks/distributed/distributed.py", *options, cwd=ROOT)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    file = tmp_path_factory.mktemp("figures") / "figures.json"
    asked = ("--only", "conv-small", "--only", "traffic", "--only", "channels")
    done = run(*asked, "--ranks", "2", "--transports", "gloo", "--seconds", "0", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def test_halo_traffic_of_a_convolution(measured: tuple[dict[str, Any], str]) -> None:
    (row,) = measured[0]["traffic"]
    calls, moved = row["collectives"]["all_to_all"]
    # A row of 16 channels and 64 columns of float32 forward, and one backward.
    assert (calls, moved) == (2, 2 * 16 * 64 * 4)
    # The gradients of weight and bias travel together.
    assert row["collectives"]["all_reduce"] == [1, (16 * 16 * 9 + 16) * 4]


def test_every_arm_is_timed(measured: tuple[dict[str, Any], str]) -> None:
    (row,) = measured[0]["speed"]
    compiled = {"one process, compiled", "Gloo, compiled"}
    threads = "one process, a thread per rank"
    assert set(row["seconds"]) == {"one process", threads, "slab", "slabs at once", "Gloo", *compiled}
    assert all(seconds > 0 for seconds in row["seconds"].values())
    assert row["error"] < 1e-5


def test_split_channels_move_what_the_formulas_say(measured: tuple[dict[str, Any], str]) -> None:
    rows = measured[0]["channels"]
    assert {row["algorithm"] for row in rows} == {"x", "y", "auto"} and len(rows) == 9
    assert [row for row in rows if row["sent"] != row["formula"]] == []


def test_tables_come_last(measured: tuple[dict[str, Any], str]) -> None:
    record, output = measured
    titles = [table.title for table in tables(record)]
    assert len(titles) == 3
    assert all(table.markdown().count("\n") == len(table.rows) + 3 for table in tables(record))
    assert [title for title in titles if title.split(",")[0] in " ".join(output.split())] == titles


@pytest.mark.parametrize(
    "options, said",
    [
        (("--only", "conv5"), "invalid choice: 'conv5'"),
        (("--ranks", "3"), "invalid choice: 3"),
        (("--transports", "smoke"), "invalid choice: 'smoke'"),
    ],
    ids=["case", "ranks", "transport"],
)
def test_bad_input_is_one_line(options: tuple[str, ...], said: str) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
