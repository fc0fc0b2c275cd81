"""How the zoo's results are shown."""

from __future__ import annotations

from benchmarks.models.tables import summary, tables


def test_each_kind_of_partition_has_a_column_and_the_first_reason_is_reported() -> None:
    records = [
        {"model": "tv.net", "partition": "height=2,width=2", "result": "ok", "compared": True},
        {"model": "tv.net", "partition": "channel=4", "result": "runs"},
        {"model": "tv.net", "partition": "--parts height=4", "result": "wrong", "reason": "an output | is off"},
        {"model": "tv.other", "partition": "sample=2,channel=2", "result": "refused", "reason": "no rule"},
    ]
    (table,) = tables(records)
    assert table.rows == [
        ("net", "ok", "runs", "wrong", "an output \\| is off"),
        ("other", "", "refused", "", "no rule"),
    ]
    said = summary(records)
    assert "1 of 1 under space, 1 of 2 under channels, 0 of 1 with parts in turn" in said
    assert "1 compared number by number" in said
