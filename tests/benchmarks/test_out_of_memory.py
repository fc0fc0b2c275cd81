"""Steps of mucudnn's plans in which memory runs out, in short; and what is called a fault."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.faults.out_of_memory import ARMS, FAULTS, OUTCOMES, built, outcomes, table
from benchmarks.faults.out_of_memory_trial import ALLOCATORS_OWN, SETTINGS, judged


def test_what_is_called_a_fault() -> None:
    assert judged(None, 0.5, 0, False, False)[0] == "went on"
    assert judged(None, 0.5, -64, True, False)[0] == "gave way"
    assert judged(f"RuntimeError: {ALLOCATORS_OWN}", 0.5, 0, False, False)[0] == "ended"
    assert judged(None, 1.5, 0, True, False)[0] == "wrong"
    assert judged(None, float("nan"), 0, True, False)[0] == "wrong"
    assert judged(None, 0.5, 64, True, False)[0] == "leaked"
    assert judged(None, 0.5, 0, False, True)[0] == "unclear"
    assert judged("KeyError: 3", 0.5, 0, False, False)[0] == "unclear"
    assert judged(f"RuntimeError: {ALLOCATORS_OWN}\nat line 3", 0.5, 0, False, False)[0] == "unclear"
    assert set(ARMS) == set(SETTINGS) and set(FAULTS) < set(OUTCOMES)


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
@pytest.mark.parametrize(("arm", "lasting"), [("a limit", True), ("a total", False)])
def test_some_allocations_that_fail(arm: str, lasting: bool, tmp_path: Path) -> None:
    found = outcomes(arm, lasting, 11, built(tmp_path))
    assert not [record for record in found if record["outcome"] in FAULTS], found
    assert {"gave way", "ended"} <= {record["outcome"] for record in found}
    assert all(record["divided"] for record in found)
    assert table({arm: found}).rows[0][1] == str(len(found))
