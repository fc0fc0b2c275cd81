"""The benchmark of parts in turn, on a small training step."""

from __future__ import annotations

from benchmarks.turns import turns


def test_a_training_step_is_measured_in_all_ways() -> None:
    record = turns.measured(turns.Case("UNet3d", 16, parts="depth=2"), rounds=1)
    for way in ("alone", "turns", "limited"):
        assert record[way]["memory"] > 0 and record[way]["seconds"] > 0
    assert record["alone"]["error"] == 0 < record["limited"]["error"] < 1e-3
    assert record["limit"] == int(turns.SHARE * record["alone"]["memory"])
    (row,) = turns.table([record]).rows
    assert row[:3] == ("UNet3d", "16", "depth=2") and len(row) == len(turns.table([]).headings)
