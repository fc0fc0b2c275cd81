"""The search of benchmarks/planning/null_peak.py for the largest batch."""

from __future__ import annotations

import pytest

from benchmarks.planning.null_peak import largest


@pytest.mark.parametrize("most", [0, 1, 2, 7, 60, 1000, 20000])
@pytest.mark.parametrize("factor", [0.0, 0.5, 0.98, 1.0, 1.01, 3.0])
def test_the_largest_batch_is_near(most: int, factor: float) -> None:
    asked: list[int] = []
    found = largest(lambda batch: asked.append(batch) or batch <= most, int(factor * most))
    assert found <= most <= found + found // 50
    assert not found or found in asked
    assert len(asked) == len(set(asked)) and min(asked) > 0
    if most > 50 and factor == 1.0:
        assert len(asked) <= 3
