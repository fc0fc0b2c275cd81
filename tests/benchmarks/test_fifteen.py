"""benchmarks/gpu/fifteen.py and tests/gpu/run.py without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_void_p
from pathlib import Path

import pytest
import torch
from cudnn_wheels import H200
from simulated_card import SimulatedCard

from benchmarks.gpu import fifteen
from benchmarks.gpu.figures import Figures, read, summary
from benchmarks.gpu.steps import engines
from mucudnn.providers.cudnn.graph import PlannedCard

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_goes_on_behind_a_crash_and_a_hang(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "tests/benchmarks/planted/fifteen.py",
        "--device",
        "cpu",
        "--small",
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--state", str(tmp_path / "state"), "--only", "crash", "--only", "hang", "--only", "card"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "fifteen.py: 1 of 3 steps are done; failed: crash, hang; left: none"
    page = (tmp_path / "out/summary.md").read_text()
    assert "| crash | failed: signal SIGSEGV" in page and "| hang | killed after 3 s |" in page
    assert "| kept |" in page and "| card | done |" in page and f"| torch | {torch.__version__} |" in page
    (paused,) = (entry["value"] for entry in read(tmp_path / "state/figures.jsonl")["hang"])
    assert not Path(f"/proc/{paused}").exists()  # of another session than the step that started it
    with tarfile.open(tmp_path / "out/all.tgz") as tar:
        assert {"gpu/figures.jsonl", "gpu/state.json", "gpu/hang.txt"} <= set(tar.getnames())
        log = tar.extractfile("gpu/hang.txt")
        assert log is not None and b"planted/hang.py" in log.read()  # where it was when it was killed


def test_a_later_run_repeats_what_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"card": "done", "engines": "failed: signal SIGSEGV", "layers": "unfinished"}
    ran: list[tuple[str, float]] = []
    (tmp_path / "state.json").write_text(
        json.dumps({name: {"state": state, "seconds": 1.0} for name, state in states.items()})
    )

    def run(self: fifteen.Fifteen, name: str, seconds: float) -> str:
        ran.append((name, seconds))
        state = "unfinished" if name == "layers" and len(ran) < 12 else "done"
        self.states[name] = {"state": state, "seconds": 1.0}
        return state

    monkeypatch.setattr(fifteen.Fifteen, "run", run)
    monkeypatch.setattr(sys, "argv", ["fifteen.py", "--out", str(tmp_path / "out"), "--state", str(tmp_path)])
    assert fifteen.main() == 0
    # What is unfinished at the end has another turn with the seconds that are left.
    assert [name for name, _ in ran] == [*list(fifteen.STEPS)[1:], "deepbench", "layers", "layers"]
    assert max(seconds for _, seconds in ran) <= fifteen.LATER_SECONDS


def test_without_time_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["fifteen.py", "--out", str(tmp_path / "out"), "--state", str(tmp_path), "--seconds", "4"]
    monkeypatch.setattr(sys, "argv", command)
    assert fifteen.main() == 3


def test_the_last_figure_of_a_name_counts(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    figures = Figures(path, "card")
    figures.add("memory", 1.0, "GiB")
    figures.add("memory", 2.0, "GiB", seen="twice")
    Figures(path, "host").add("call", "a|b\nc")
    with path.open("a") as file:
        file.write('{"step": "card", "na')  # the process was killed here
    found = read(path)
    assert found["card"] == [
        {"step": "card", "name": "memory", "value": 2.0, "unit": "GiB", "about": {"seen": "twice"}}
    ]
    assert figures.has("memory") and not figures.has("call")
    page = summary({"card": {"state": "done", "seconds": 1.25}}, found, "title")
    assert "| card | done | 1.2 | 1 |" in page and "| call | a/b c |  |" in page


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fifteen.Run:
    """A step's run on a card that answers for a GPU; the convolutions are those of the host."""
    simulated = SimulatedCard()
    monkeypatch.setattr(engines, "Card", lambda index: simulated)

    @contextmanager
    def planning() -> Iterator[PlannedCard]:
        yield PlannedCard(handle=c_void_p(32))

    monkeypatch.setattr(simulated, "planning", planning)
    monkeypatch.setattr(engines, "properties_of", lambda library, handle: H200)
    figures = Figures(tmp_path / "figures.jsonl", "engines")
    return fifteen.Run(figures, torch.device("cpu"), True, tmp_path, float("inf"))


def test_the_engines_of_a_card_are_compared_with_those_listed_without_one(card: fifteen.Run, tmp_path: Path) -> None:
    engines._listed(card)
    engines._older(card)
    figures = {entry["name"]: entry["value"] for entry in read(tmp_path / "figures.jsonl")["engines"]}
    assert figures["engines as listed without a card"].startswith("equal, [5, 5, 5")
    assert "backward_filter fft_tiling" in figures["older functions, tf32"]
    assert "status" not in figures["older functions, tf32"]


def test_gpu_tests_run_by_file_and_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "tests/gpu/run.py", "--device", "cpu", "--results", str(tmp_path), "test_memory.py"]
    for printed in (True, False):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("tests/gpu/test_memory.py: 15 skipped" in done.stdout) == printed
        assert "1 of 1 files are run" in done.stderr
    (outcome,) = json.loads((tmp_path / "gpu-tests.json").read_text())["cpu"].values()
    assert outcome["code"] == 0


def test_the_scripts_need_no_more_than_torch_and_numpy() -> None:
    names = ["benchmarks.gpu.gpu", "benchmarks.gpu.worker", "benchmarks.gpu.fifteen", "distconv.model.interface"]
    names += [f"benchmarks.gpu.steps.{name}" for name in (*fifteen.STEPS, *fifteen.REST)]
    program = f"""
import importlib, importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        absent = "rich", "tqdm", "platformdirs", "cloudpickle", "hypothesis", "matplotlib", "mpi4py"
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for name in {names}:
    importlib.import_module(name)
from benchmarks.table import Table, show
show([Table("title", ("a", "b"), [("1", "2")])])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["**title**", "", "| a | b |", "| :-- | --: |", "| 1 | 2 |"]
