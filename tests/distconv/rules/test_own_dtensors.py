"""A program's own DTensors, on meshes that are not distconv's, behave as without distconv."""

from __future__ import annotations

from functools import cache

import pytest
from jobs import SCRIPTS

from tests.forked_python import run_python

SCRIPT = SCRIPTS / "own_dtensors.py"


@cache
def lines(how: str) -> list[str]:
    done = run_python(SCRIPT, how)
    assert done.returncode == 0, done.stderr
    # torch's dispatch of DTensors in C++ and that in Python find the same errors, and write them a little differently;
    # torch 2.11 takes a batch norm apart further in Python than in C++, before it refuses what is left.
    parts = done.stdout.replace("aten._native_batch_norm_legit.no_stats", "aten.native_batch_norm.default")
    return [line.replace("::", ".").rstrip(".") for line in parts.splitlines()]


@pytest.mark.parametrize("how", ["imported", "used", "script"])
def test_own_dtensors_do_what_they_do_alone(how: str) -> None:
    assert len(lines("alone")) > 40
    assert lines(how) == lines("alone")
