"""The benchmarks of planning: their sums, and that what they train is planned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mucudnn
from benchmarks.planning import found as planning_found
from benchmarks.planning import planning
from benchmarks.planning.planning import Program


def few() -> tuple[nn.Module, Iterator[Tensor]]:
    return nn.Conv2d(2, 3, 15, padding=7), itertools.repeat(torch.randn(4, 2, 16, 16))


def test_first_steps_are_sums_over_stock_s() -> None:
    stock = {"seconds": [2.0] + [1.0] * 59, "settled": 1.0, "trials": 0, "cost": 0.0}
    live = {"seconds": [4.0] + [0.5] * 59, "settled": 0.5, "again": 0.25, "trials": 7, "cost": -1.5}
    slower = {**live, "seconds": [8.0] + [0.5] * 59}
    figures = {"stock": [stock], "live": [live, slower, live]}
    table = planning.table("slices", figures)
    assert table.headings[1:4] == ("1 step", "10 steps", "50 steps")
    assert table.rows[1] == (
        *("live", "4.000 (2.00)", "8.500 (0.77)", "28.500 (0.56)", "0.500 (0.50)", "0.250 (0.25)"),
        *("3.5", "7", "-1.500"),
    )


def test_the_ratio_is_that_of_a_round() -> None:
    found = {"stock": [1.0, 9.0, 1.0], "live": [0.2, 1.0, 0.3], "ahead": [0.2, 0.5, 0.2]}
    seconds, over_stock = ("1.0000", "0.3000", "0.2000"), ("0.200 (0.156 to 0.250)", "0.200 (0.128 to 0.200)")
    assert planning_found.row("slices", found) == ("slices", "3", *seconds, *over_stock, "1.500 (1.250 to 1.750)")


def test_what_is_found_takes_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trained: list[tuple[str, int, int]] = []

    def in_this_process(program: str, arm: str, steps: int, database: str, *others: Any) -> dict[str, Any]:
        found = planning.train(program, arm, steps, database, *others)
        trained.append((arm, steps, len(found["seconds"])))
        return found

    monkeypatch.setitem(planning.PROGRAMS, "few", Program(few, 3))
    monkeypatch.setattr(planning_found, "in_a_process", in_this_process)
    monkeypatch.setattr(planning_found, "LEAST_ROUNDS", 2)
    found = planning_found.compared("few", 0.0)
    assert trained == [("live", 3, 3), ("ahead", 2, 2)]
    assert list(found) == ["stock", "live", "ahead"] and {len(steps) for steps in found.values()} == {2}
    assert all(seconds > 0 for steps in found.values() for seconds in steps)
    assert not mucudnn.is_patched()
