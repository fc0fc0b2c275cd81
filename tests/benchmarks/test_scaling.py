"""The benchmark of strong scaling, on a network that is small enough to plan in a second."""

from __future__ import annotations

import pytest

from benchmarks.distributed import scaling
from benchmarks.distributed.scaling_tables import tables
from mucudnn.networks.models import MeshTangling


def test_samples_single_partitions_and_strategies_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    small = scaling.Case(lambda: MeshTangling(per_block=1, widths=(4, 6, 4)), (18, 64, 64), 4)
    monkeypatch.setattr(scaling, "CASES", {"small": small})
    rows = [row for ranks in (4, 8) for row in scaling.simulate("small", ranks)]
    assert [(row["ranks"], row["machine"]) for row in rows] == [(4, "lassen"), (4, "h100"), (8, "lassen"), (8, "h100")]
    for row in rows:
        assert (row["samples"] is None) == (row["ranks"] > 4)
        assert row["strategy"]["seconds"] <= row["single"]["seconds"]
        assert row["samples"] is None or row["single"]["seconds"] <= row["samples"]["seconds"]
    steps, _, gains, _ = tables(rows)
    assert [line[:2] for line in steps.rows] == [("small, 4", "4"), ("small, 4", "8")]
    assert steps.rows[1][2] == "-"
    samples, best = rows[0]["samples"]["seconds"], min(row["strategy"]["seconds"] for row in rows[::2])
    assert gains.rows[0][3] == f"{samples / best:.2f}"


def test_what_does_not_fit_a_gpu_is_not_compared() -> None:
    plan = {"partitions": ["sample=4"], "seconds": 1.0, "gradients": 0.5, "memory": 2.0**40, "fits": False}
    row = {"network": "large", "batch": 4, "ranks": 4, "machine": "h100"}
    steps, gains = tables([{**row, "samples": plan, "single": None, "strategy": None}])
    assert steps.rows[0][2:5] == ("memory", "memory", "memory") and not gains.rows
