"""The command line: a script runs as under plain python, and every mistake is one line and exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import mucudnn
from mucudnn.__main__ import main
from mucudnn.commands import findings
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.networks import layers
from mucudnn.optimizer import Option
from mucudnn.program import NotFound
from mucudnn.reporting.record import from_json
from mucudnn.reporting.run_file import Outcome
from mucudnn.runtime.session import Session
from mucudnn.timing import progress
from mucudnn.timing.store import Store

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
        timeout=120,
        # A shell's background job, and all it starts, ignores interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return done.returncode, done.stdout, done.stderr


def same_as_python(*command: str, cwd: Path = SCRIPTS, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
    plain = outcome(*command, cwd=cwd, flags=flags)
    assert outcome("-c", BARE, *command, cwd=cwd, flags=flags) == plain
    return plain


@pytest.fixture(autouse=True)
def own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "times.sqlite"
    monkeypatch.setenv("MUCUDNN_DATABASE", str(path))
    return path


# run: as under plain python.


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


def test_a_training_script_prints_what_it_prints_alone(tmp_path: Path) -> None:
    plain = outcome("train.py")
    file = tmp_path / "plans.json"
    divided = command("run", "--workspace-limit", "1MiB", "--report", str(file), "--verbose", "train.py")
    assert divided[:2] == plain[:2] and plain[0] == 0
    records = Outcome.from_json(json.loads(file.read_text())).records
    assert {record.direction for record in records} == {"forward", "backward_filter"}
    assert all(record.workspace <= record.limit == 2**20 for record in records)
    assert "2 convolutions" in divided[2] and "4x2x4096" in divided[2]


def test_a_failing_script_still_reports(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    plain = outcome("train.py", "fail")
    divided = command("run", "--report", str(file), "--progress", "off", "-m", "train", "fail")
    assert divided[:2] == plain[:2] and plain[0] == 1
    # A module's traceback is longer than a script's, but by none of our frames.
    assert divided[2].count("  File ") == plain[2].count("  File ") == 1
    assert divided[2].endswith("ValueError: the script fails\n")
    assert len(Outcome.from_json(json.loads(file.read_text())).records) == 2


# Mistakes.


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that ends with code 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.endswith("\n") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["walk"], "walk"),
        (["run"], "SCRIPT"),
        (["run", "--report"], "--report"),
        (["run", "-m"], "MODULE"),
        (["run", "missing.py"], "cannot run missing.py: No such file"),
        (["run", "-m", "missing.module"], "cannot run module missing.module"),
        (["run", "-m", "json.missing"], "cannot run module json.missing"),
        (["run", "-m", ".relative"], "cannot run module .relative"),
        (["run", str(SCRIPTS)], "no __main__.py"),
        (["run", "--workspace-limit", "64XB", "missing.py"], "--limit: '64XB': accepted is"),
        (["run", "--policy", "some", "missing.py"], "undivided, powerOfTwo, all"),
        (["run", "--database", "/", "missing.py"], "not of a directory"),
        (["run", "--progress", "maybe", "missing.py"], "auto, on or off"),
        (["run", "--log", "loud", "missing.py"], "debug"),
        (
            ["run", "--report", "/missing/folder/file.json", "missing.py"],
            "cannot write --report /missing/folder/file.json",
        ),
        (["run", "--unknown", "missing.py"], "--unknown"),
        (["run", "--", "missing.py"], "cannot run missing.py"),
        (["run", "--verbose", "-mmissing", "--help"], "cannot run module missing"),
        (["run", "--report=x.json", "missing.py", "--report"], "cannot run missing.py"),
        (["bench", "missing.module:net"], "no module missing.module"),
        (["bench", "missing.py:net"], "no such file"),
        (["bench", f"{SCRIPTS}/network.py:missing"], "has no 'missing'"),
        (["bench", f"{SCRIPTS}/network.py:NOTHING"], "torch.nn.Module"),
        (["bench", "builtins:dict", "--input", "3,8,8"], "no torch.nn.Module but a dict"),
        (["bench", f"{SCRIPTS}/network.py:small"], "--input C,H,W"),
        (["bench", "x", "--input", "3"], "3,224,224"),
        (["bench", "x", "--batch", "0"], "at least 1"),
        (["report", "missing.json"], "cannot read missing.json: No such file"),
        (["report", str(SCRIPTS / "show.py")], "cannot read"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in mistake(capsys, *arguments)


@pytest.mark.parametrize("name", ["run", "bench", "plan", "plot", "report", "doctor"])
def test_a_wrong_variable_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MUCUDNN_PROGRESS", "maybe")
    arguments = {"run": ["endings.py", "end"], "bench": ["resnet18"], "plan": ["resnet18"], "plot": ["resnet18"]}.get(
        name, []
    )
    line = mistake(capsys, name, *arguments)
    assert "MUCUDNN_PROGRESS='maybe': accepted is auto, on or off" in line


@pytest.mark.parametrize("name", ["", "run", "bench", "plan", "plot", "report", "doctor"])
def test_help_teaches_by_examples(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*([name] if name else []), "--help"])
    assert ended.value.code == 0
    assert f"python -m mucudnn {name}" in capsys.readouterr().out.partition("examples:")[2]


# bench, report, doctor.


def built(name: str) -> Callable[[], torch.nn.Module]:
    return layers.find(f"{SCRIPTS}/network.py:{name}").build


def test_the_convolutions_of_a_network() -> None:
    met = layers.convolutional(built("small"), (2, 3, 21, 21))
    forward = [layer for layer in met if layer.problem.direction is Direction.FORWARD]
    assert [(layer.name, layer.count, str(layer.problem)) for layer in forward] == [
        ("0", 1, "2x3x21x21 k8x3x5x5 s2"),
        ("2.same", 2, "2x8x9x9 k8x8x3x3 p1"),
        ("2.grouped", 1, "2x8x11x11 k8x2x3x3 g4"),
        ("3", 1, "2x8x9x9 T8x2x3x3 s2"),
    ]
    assert forward[-1].problem.output_shape == (2, 2, 20, 20)
    by_name = {
        name: {str(layer.problem.direction) for layer in met if layer.name == name} for name in ("0", "2.same", "3")
    }
    assert by_name == {
        "0": {"forward", "backward_filter"},  # nobody asks for the gradient of the data
        "2.same": {"forward", "backward_data", "backward_filter"},
        "3": {"forward", "backward_data"},  # frozen
    }


def test_a_network_by_a_bare_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    network = layers.find("resnet18")
    assert network.input_shape == (3, 224, 224) and network.batch
    with pytest.raises(NotFound, match="resnet18"):
        layers.find("resnet19")


def test_bench_prints_what_was_chosen(capsys: pytest.CaptureFixture[str], own_database: Path) -> None:
    arguments = ["bench", f"{SCRIPTS}/network.py:small", "--input", "3,21,21", "--batch", "2", "--progress", "off"]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["layer"], row["count"], row["direction"]) for row in rows[:2]] == [
        ("0", 1, "forward"),
        ("0", 1, "backward_filter"),
    ]
    known = Store(str(own_database)).counts()
    assert known.problems >= len(rows)  # micro-tiles are problems of their own
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "2.same x2" in out and f"{len(rows)} convolutions" in out
    assert Store(str(own_database)).counts() == known  # measured once


RECORD = mucudnn.Record(
    ConvProblem.of_convolution(Direction.FORWARD, (4, 1, 9), (1, 1, 3), stride=(1,), padding=(0,), dilation=(1,)),
    "forward",
    1024.0,
    ((4, "fft"),),
    1.0,
    1.0,
    2.0,
    512,
)


def test_report_shows_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    file.write_text(json.dumps(Outcome([RECORD]).to_json()))
    assert main(["report", str(file), "--json"]) == 0
    assert from_json(json.loads(capsys.readouterr().out)) == [RECORD]
    assert main(["report", str(file)]) == 0
    out = capsys.readouterr().out
    assert "fft(4)" in out and "1 convolution, 0 of them divided" in out


def test_report_shows_the_database(capsys: pytest.CaptureFixture[str], own_database: Path) -> None:
    key = {**RECORD.problem.launch_key(), "device": "cpu a", "threads": 2}
    Store(str(own_database)).record(key, [Option(2, "fft", 0.004, 1 << 20)])
    assert main(["report", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["launches"] == [{"extent": 2, "algorithm": "fft", "seconds": 0.004, "workspace": 1 << 20}]
    assert main(["report"]) == 0
    out = capsys.readouterr().out
    assert "cpu a" in out and "2.000" in out and "1 launches of 1 convolutions" in out


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_database: Path) -> None:
    monkeypatch.setenv("MUCUDNN_BATCH_SIZE_POLICY", "all")
    assert main(["doctor", "--workspace-limit", "unlimited", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shim"] == "works"
    assert found["versions"]["torch"] == torch.__version__
    assert found["settings"]["workspace_limit"] == {
        "value": "unlimited",
        "from": "argument",
        "variable": "MUCUDNN_WORKSPACE_LIMIT",
    }
    assert found["settings"]["policy"]["from"] == "MUCUDNN_BATCH_SIZE_POLICY"
    assert found["database"] == {"path": str(own_database), "kept": True, "convolutions": 0, "launches": 0}
    assert {"stock", "gemm", "fft"} <= set(found["algorithms"])
    assert not mucudnn.is_patched()


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_doctor_tells_what_does_not_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def broken(**settings: Any) -> Any:
        raise RuntimeError("no\nshim")

    if fault == "raises":
        monkeypatch.setattr(mucudnn, "patched", broken)
    else:
        monkeypatch.setattr(Session, "records", lambda self: [])
    assert main(["doctor"]) == 1
    assert "fails: " in capsys.readouterr().out
    assert findings.check_shim().count("\n") == 0


# The progress bar.


def test_a_bar_counts_in_nests_and_threads(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bar(100, "outer", "on") as advance, progress.bar(1, "inner", "on") as inner:
        inner()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: advance(), range(100)))
    err = capsys.readouterr().err
    assert "outer" in err and "inner" in err


@pytest.mark.parametrize(
    ("mode", "terminal", "shown"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_a_bar_is_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mode: str, terminal: bool, shown: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress.bar(2, "measuring", mode) as advance:
        advance()
    assert ("measuring" in capsys.readouterr().err) is shown
