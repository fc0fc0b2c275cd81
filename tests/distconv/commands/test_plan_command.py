"""`distconv plan` as a command: fewer ranks where more are slower, models with several inputs, and bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from distconv.__main__ import main

NETWORK = ("small_network:Small", "--input", "3,12,12", "--batch", "4", "--machine", "lassen")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Plans what the options say; what was found, or the line that tells why not."""

    def planned(*options: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["distconv", "plan", *options, "--json"])
        code, told = main(), capsys.readouterr()
        assert code == (2 if told.err else 0) and told.err.count("\n") == (code == 2)
        return told.err if code else json.loads(told.out)

    return planned


def test_parameters_are_planned_in_shards(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients and momentum there are three numbers for each of 885 parameters, of which a rank has 222 then."""
    monkeypatch.setattr("distconv.model.fully_sharded.LEAST_BYTES", 0)
    whole, sharded = (plan(*NETWORK, "--ranks", "4", "--only", "sample=4", *on) for on in ((), ("--shard-parameters",)))
    assert whole["memory"] - sharded["memory"] == 3 * 4 * (885 - 222)
    assert whole["seconds"] < sharded["seconds"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--ranks", "2", "--also", "3,x"), "accepted are channels and sizes, as 3,224,224"),
        (
            ("--ranks", "2", "--also", "3,8,8"),
            "Small does not take --input 3,12,12 and 3,8,8 with --batch 4",
        ),
        (("--ranks", "7", "--axes", "depth"), "accepted for 2-D data"),
        (("--ranks", "2", "--memory", "lots"), "memory 'lots': accepted: bytes"),
    ],
)
def test_what_cannot_be_planned_is_one_line(plan: Any, options: tuple[str, ...], complaint: str) -> None:
    assert complaint in plan(*NETWORK, *options)


def test_without_a_machine_it_is_this_one(plan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("distconv.performance.machine.cache_folder", lambda: tmp_path)
    assert "it has not been measured; run python -m distconv calibrate" in plan(*NETWORK[:-2], "--ranks", "2")
