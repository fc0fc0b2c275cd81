"""A script runs as under plain python."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mucudnn.reporting.record import Outcome
from tests.forked_python import run_python

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("scripts")

# The package without its __init__, and so without torch, which takes seconds to import.
BARE = f"""
import sys, types
package = sys.modules["mucudnn"] = types.ModuleType("mucudnn")
package.__path__ = [{str(ROOT / "mucudnn")!r}]
from mucudnn import program
if sys.argv[1] == "-m":
    del sys.argv[1]
    program.module(sys.argv[1]).run(sys.argv[2:])
else:
    program.script(sys.argv[1]).run(sys.argv[2:])
"""


def outcome(*command: str, cwd: Path = SCRIPTS, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *flags, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        # A shell's background job, and all it starts, ignores interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return done.returncode, done.stdout, done.stderr


def same_as_python(*command: str, cwd: Path = SCRIPTS, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
    plain = outcome(*command, cwd=cwd, flags=flags)
    assert outcome("-c", BARE, *command, cwd=cwd, flags=flags) == plain
    return plain


@pytest.mark.parametrize("flags", [(), ("-P",)], ids=["", "safe path"])
def test_what_a_script_sees(flags: tuple[str, ...]) -> None:
    code, out, _ = same_as_python("show.py", "a", "--b", "--", "-m", flags=flags)
    assert (code, "'--b', '--', '-m'" in out) == ((1, False) if flags else (0, True))


def test_a_script_elsewhere_and_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.py").symlink_to(SCRIPTS / "show.py")
    code, out, _ = same_as_python("link.py", cwd=tmp_path)
    assert code == 0 and str(SCRIPTS) in out


@pytest.mark.parametrize("name", ["scripts.show", "package", "package.sub"])
def test_what_a_module_sees(tmp_path: Path, name: str) -> None:
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    (tmp_path / "neighbour.py").touch()
    (tmp_path / "package").mkdir()
    for file in ("__init__", "__main__", "sub"):
        shutil.copy(
            SCRIPTS / ("neighbour.py" if file == "__init__" else "show.py"), tmp_path / "package" / f"{file}.py"
        )
    code, out, _ = same_as_python("-m", name, "--x", cwd=tmp_path)
    assert code == 0 and "'--x'" in out


@pytest.mark.parametrize("packed", [False, True], ids=["directory", "archive"])
def test_a_directory_or_archive_with_a_main(tmp_path: Path, packed: bool) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    shutil.copy(SCRIPTS / "show.py", folder / "__main__.py")
    shutil.copy(SCRIPTS / "neighbour.py", folder)
    if packed:
        with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
            for file in folder.iterdir():
                archive.write(file, file.name)
    assert same_as_python("program.zip" if packed else "program", "x", cwd=tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("end", 0),
        ("exit", 0),
        ("exit3", 3),
        ("exit-text", 1),
        ("raise", 1),
        ("interrupt", -2),
        ("hook", 1),
        ("thread", 0),
        ("pickle", 0),
        ("spawn", 0),
        ("output", 0),
    ],
)
def test_endings_and_tracebacks(ending: str, code: int) -> None:
    ended, out, err = same_as_python("endings.py", ending)
    assert ended == code and "at exit" in out
    assert ("Traceback" in err) is (ending in ("raise", "interrupt"))


def test_a_script_that_is_no_python() -> None:
    code, _, err = same_as_python("unparsable.py.txt")
    assert code == 1 and "SyntaxError" in err and "Traceback" not in err


def command(*arguments: str, cwd: Path = SCRIPTS) -> tuple[int, str, str]:
    """The whole program, in a process of its own."""
    return outcome("-m", "mucudnn", *arguments, cwd=cwd)


@pytest.mark.usefixtures("ahead")
def test_a_training_script_prints_what_it_prints_alone(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    divide = ("-m", "mucudnn", "run", "--workspace-limit", "1MiB", "--report", file, "--verbose")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    plain, divided = (run_python(*how, "train.py", cwd=SCRIPTS, env=environment) for how in ((), divide))
    assert divided.stdout == plain.stdout and divided.returncode == plain.returncode == 0
    records = Outcome.from_json(json.loads(file.read_text())).records
    assert {record.direction for record in records} == {"forward", "backward_filter"}
    assert all(record.workspace <= record.limit == 2**20 for record in records)
    assert "2 convolutions" in divided.stderr and "4x2x4096" in divided.stderr


@pytest.mark.usefixtures("ahead")
def test_a_failing_script_still_reports(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    plain = outcome("train.py", "fail")
    divided = command("run", "--report", str(file), "--progress", "off", "-m", "train", "fail")
    assert divided[:2] == plain[:2] and plain[0] == 1
    # A module's traceback is longer than a script's, but by none of our frames.
    assert divided[2].count("  File ") == plain[2].count("  File ") == 1
    assert divided[2].endswith("ValueError: the script fails\n")
    assert len(Outcome.from_json(json.loads(file.read_text())).records) == 2
