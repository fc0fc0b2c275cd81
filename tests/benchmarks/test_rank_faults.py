"""What `benchmarks/faults/rank_faults.py` and `long_run.py` call a fault."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest

from benchmarks.faults import long_run
from benchmarks.faults.rank_faults import Trial, difference, table

GOOD = Trial("run, Gloo", 3, 0, 2, 7, 1.5, 137, [], ["rank 1 of 2 was killed (signal 9)"], 4, 0, 0, 1e-15)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, []),
        ({"seconds": 11.0}, ["processes were left after 10 s"]),
        ({"seconds": math.inf, "code": None}, ["processes were left after 10 s", "exit code None"]),
        ({"code": 0}, ["exit code 0"]),
        ({"left": ["a", "b"]}, ["left: a, b"]),
        ({"code_anew": 1}, ["anew on 4: exit code 1"]),
        ({"missing": 2}, ["anew on 4: 2 steps missing"]),
        ({"difference": math.nan}, ["anew on 4: losses differ by nan"]),
    ],
)
def test_what_is_a_fault(changes: dict[str, object], fault: list[str]) -> None:
    each = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert each.faults() == fault
    assert table([GOOD, each]).rows[0][-1] == str(int(bool(fault)))


def test_losses_are_compared_step_by_step() -> None:
    assert difference({0: 2.0, 3: 1.0}, {0: 2.0, 1: 9.0, 3: 1.0}) == 0.0
    assert difference({3: 1.1}, {3: 1.0}) == pytest.approx(0.1)


def test_what_grows_is_reported() -> None:
    flat = [{"MiB": 100.0, "objects": 1000, "processor": 0.01} for _ in range(20)]
    assert long_run.faults(long_run.growth(flat)) == []
    growing = [each | {"MiB": 100.0 + number} for number, each in enumerate(flat)]
    assert [fault[:3] for fault in long_run.faults(long_run.growth(growing))] == ["MiB"]
    slower = [each | {"processor": 0.01 + number / 4000} for number, each in enumerate(flat)]
    assert [fault[:9] for fault in long_run.faults(long_run.growth(slower))] == ["processor"]
