"""The commands, and that every mistake is one line and exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mucudnn
from mucudnn import networks
from mucudnn.__main__ import main
from mucudnn.commands import findings
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.optimizer import Option
from mucudnn.program import NotFound
from mucudnn.reporting.record import Outcome, from_json
from mucudnn.runtime.session import Session
from mucudnn.timing.store import Store

SCRIPTS = Path(__file__).with_name("scripts")


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
        (["run", "--unknown", "missing.py"], "--unknown; see python -m mucudnn run --help"),
        (["bench", "network.py:small", "--input", "3,8,8", "--bach", "3"], "did you mean --batch?"),
        (
            ["--vrsion", "run", "missing.py"],
            "arguments: --vrsion (did you mean --version?); see python -m mucudnn --help",
        ),
        (["run", "--", "missing.py"], "cannot run missing.py"),
        (["run", "--verbose", "-mmissing", "--help"], "cannot run module missing"),
        (["run", "--report=x.json", "missing.py", "--report"], "cannot run missing.py"),
        (["bench", "missing.module:net", "--input", "3,8,8"], "no module missing.module"),
        (["bench", "missing.py:net", "--input", "3,8,8"], "no such file"),
        (["bench", f"{SCRIPTS}/network.py:missing", "--input", "3,8,8"], "has no 'missing'"),
        (["bench", f"{SCRIPTS}/network.py:NOTHING", "--input", "3,8,8"], "torch.nn.Module"),
        (["bench", "builtins:dict", "--input", "3,8,8"], "no torch.nn.Module but a dict"),
        (["bench", f"{SCRIPTS}/network.py:small"], "give --input C,H,W"),
        (["bench", "x", "--input", "3"], "3,224,224"),
        (["bench", "x", "--batch", "0"], "at least 1"),
        (["report", "missing.json"], "cannot read missing.json: No such file"),
        (["report", str(SCRIPTS / "show.py")], "not a file that `run --report` wrote"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in mistake(capsys, *arguments)


@pytest.mark.parametrize("name", ["run", "bench", "report", "doctor"])
def test_a_wrong_variable_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MUCUDNN_PROGRESS", "maybe")
    arguments = {"run": ["endings.py", "end"], "bench": ["network.py:small", "--input", "3,8,8"]}.get(name, [])
    line = mistake(capsys, name, *arguments)
    assert "MUCUDNN_PROGRESS='maybe': accepted is auto, on or off" in line


@pytest.mark.parametrize("name", ["", "run", "bench", "report", "doctor"])
def test_help_teaches_by_examples(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*([name] if name else []), "--help"])
    assert ended.value.code == 0
    assert f"python -m mucudnn {name}" in capsys.readouterr().out.partition("examples:")[2]


# bench, report, doctor.


def built(name: str) -> Callable[[], torch.nn.Module]:
    return networks.find(f"{SCRIPTS}/network.py:{name}")


def test_the_convolutions_of_a_network() -> None:
    met = networks.convolutional(built("small"), (2, 3, 21, 21))
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


def test_a_network_by_a_bare_name() -> None:
    assert networks.usual_inputs("resnet18", None, None) == ((3, 224, 224), 256)
    assert networks.usual_inputs("resnet18", (3, 64, 64), None) == ((3, 64, 64), None)
    assert isinstance(networks.find("resnet18")(), torch.nn.Module)
    with pytest.raises(NotFound, match="resnet19: accepted are module:attribute"):
        networks.find("resnet19")


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
def test_doctor_reports_what_does_not_work(
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
