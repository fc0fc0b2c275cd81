"""What is told of names that nobody knows, and warnings that name no line of the package."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mucudnn import spelling
from mucudnn.settings import VARIABLES
from mucudnn.spelling import meant, report_unknown


@pytest.mark.parametrize(
    ("name", "told"),
    [("heigth", " (did you mean height?)"), ("hight", " (did you mean height?)"), ("rows", ""), ("", "")],
)
def test_the_nearest_name_is_reported(name: str, told: str) -> None:
    assert meant(name, ["sample", "height", "width"]) == told


def test_each_variable_that_nobody_reads_is_reported_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spelling, "_reported", set())
    given = {"MUCUDNN_WORKSPACE_LIMT": "64MiB", "MUCUDNN_LOG": "info", "MUCUDNN_X": "1", "MUCUDNNX": "", "PATH": "/"}
    monkeypatch.setattr(os, "environ", given)
    for _ in range(2):
        report_unknown("MUCUDNN", VARIABLES)
    typo, other = capsys.readouterr().err.splitlines()
    assert typo == (
        "mucudnn: the environment variable MUCUDNN_WORKSPACE_LIMT is not read (did you mean MUCUDNN_WORKSPACE_LIMIT?)"
    )
    assert other.startswith("mucudnn: the environment variable MUCUDNN_X is not read; there are MUCUDNN_WORKSPACE_L")


def test_a_warning_shows_no_line_of_the_package() -> None:
    """As a user sees it, an unusable database is one line."""
    program = "import mucudnn.timing.store as s; s.Store('/proc/no/times.sqlite').counts()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("mucudnn:0: RuntimeWarning: the database /proc/no/times.sqlite cannot be used")
    assert done.stderr.count("\n") == 1
