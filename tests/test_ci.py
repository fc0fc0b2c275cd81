"""What `.ci/run` ends with where the newest torch cannot be installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_TESTED = "NOT TESTED under the newest torch: the package registry cannot be reached"


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script needs bash")
@pytest.mark.parametrize(
    ("installs", "answers", "passes", "last"),
    [
        (True, True, True, "made test-newest"),
        (False, False, True, NOT_TESTED),
        (
            False,
            True,
            False,
            "the newest torch could not be installed, as is told above, though the package registry answers",
        ),
    ],
    ids=["installed", "no registry", "not installed"],
)
def test_the_newest_torch_is_left_out_only_without_a_registry(
    installs: bool, answers: bool, passes: bool, last: str, tmp_path: Path
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    commands = tmp_path / "commands"
    commands.mkdir()
    stand_ins = {
        "make": f'[ "$1" != newest ] || exit {int(not installs)}; sleep 0.2; echo "made $1"',
        "registry": f"exit {int(not answers)}",
        "git": "",
    }
    for name, line in stand_ins.items():
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(tmp_path / ".ci/run")],
        env={**os.environ, "PATH": path, "PYTHON": str(commands / "registry")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert (done.returncode == 0) == passes
    assert done.stdout.splitlines()[-1] == last
