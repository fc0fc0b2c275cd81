"""benchmarks/gpu/first_contact.py, tests/gpu/run.py and benchmarks/gpu/everything.py without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_card import SimulatedCard

from benchmarks.gpu import contact_cudnn, first_contact
from benchmarks.gpu.first_contact import ORDER, Answers, ask
from benchmarks.layers.elsewhere import H200
from benchmarks.process import Failed
from mucudnn.planning.planner import Planner
from mucudnn.providers.cudnn.device import Device
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.legacy import Legacy
from mucudnn.settings import MEMORY, Settings
from mucudnn.timing.measurement import Measurement
from mucudnn.timing.store import Store

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"device": "NVIDIA H200", "torch": "2.11.0"}


class Answering:
    """Answers of a made-up process; some questions it does not survive."""

    def __init__(self, *deadly: str) -> None:
        self.deadly, self.asked = deadly, []

    def ask(self, within: float, question: str) -> dict[str, Any]:
        self.asked.append(question)
        if question in self.deadly:
            raise Failed("the answering process: it ended, see above")
        return {"question": f"{question}?", "answer": "yes", "figure": "1 | 2\n3", "failed": False}


def test_each_answer_is_on_the_files_at_once_and_is_not_asked_again(tmp_path: Path) -> None:
    answers = Answers(tmp_path, ABOUT)
    asked: Any = Answering("engines")
    assert ask(["properties", "engines", "older"], answers, asked, 100.0) == []
    page = (tmp_path / "first-contact-nvidia-h200.md").read_text()
    assert (
        "| properties? | yes | 1 / 2 3 |" in page and "| engines | no answer | the answering process: it ended" in page
    )
    again = Answers(tmp_path, ABOUT)
    assert again.entries == answers.entries and again.entries["engines"]["failed"]
    assert Answers(tmp_path, {**ABOUT, "torch": "2.13.0"}).entries == {}


def test_without_time_the_rest_is_left(tmp_path: Path) -> None:
    answers = Answers(tmp_path, ABOUT)
    asked: Any = Answering()
    assert ask(list(ORDER), answers, asked, 4.0) == list(ORDER)
    assert asked.asked == [] and answers.entries == {}


def test_a_process_that_dies_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Dying:
        def __init__(self, name: str, commands: list[list[str]]) -> None:
            started.append(self)

        def ask(self, within: float, question: str) -> dict[str, Any]:
            if len(started) == 1:
                raise Failed("it ended")
            return {"question": question, "answer": "yes", "figure": "-", "failed": False}

        def kill(self) -> None:
            pass

        close = kill

    monkeypatch.setattr(first_contact, "Process", Dying)
    answers = Answers(tmp_path, ABOUT)
    assert ask(["sums", "host"], answers, first_contact.Asked("cuda:0"), 100.0) == []
    assert [answers.entries[name]["answer"] for name in ("sums", "host")] == ["no answer", "yes"]
    assert len(started) == 2


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A card that answers for a GPU; the convolutions are those of the host."""
    card = SimulatedCard()
    monkeypatch.setattr(contact_cudnn, "_card", lambda device: card)
    monkeypatch.setattr(contact_cudnn, "needs_gpu", lambda device: None)

    @contextmanager
    def planning() -> Iterator[Device]:
        yield Device(handle=c_void_p(32))

    monkeypatch.setattr(card, "planning", planning)
    monkeypatch.setattr(contact_cudnn, "properties_of", lambda library, handle: {**H200, "driverVer": 13010})
    return torch.device("cpu")


def test_questions_about_cudnn(simulated: torch.device) -> None:
    assert contact_cudnn.properties(simulated) == ("no", "driverVer 13010 (written: 13000)")
    assert contact_cudnn.engines(simulated) == ("yes", "[5, 5, 5, 5, 5, 5] engines that do not compile")
    said, figure = contact_cudnn.finalizing(simulated)
    assert said == "none takes a second" and figure.startswith("no note: 30 plans, median ")
    said, figure = contact_cudnn.older_functions(simulated)
    assert "fft (TF32)" in said and "float16 backward_filter fft_tiling" in figure
    assert "status" not in figure


def test_older_functions_against_engines(simulated: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimulatedCard()
    settings = Settings.from_environment({}, database=MEMORY, policy="undivided", progress="off")
    planner = Planner(settings, Store(MEMORY), providers=(Engines(card), Legacy(card)))
    monkeypatch.setattr(contact_cudnn, "planner_on", lambda device: planner)
    monkeypatch.setattr(Measurement, "stock_seconds", lambda self: 1.0)
    said, figure = contact_cudnn.older_against_engines(simulated)
    assert said.startswith("the older one is faster in ") and said.endswith(" of 3")
    assert figure.count("legacy_") == figure.count(", eng") == figure.count("torch 1000.00 ms") == 3


def test_on_the_host_it_answers_what_a_host_can(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu/first_contact.py", "--device", "cpu", "--results", str(tmp_path)]
    command += ["--ask", "sums", "--ask", "graph"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    entries = json.loads((tmp_path / "first-contact-cpu.json").read_text())["entries"]
    assert entries["sums"]["answer"] == "yes" and "relative error" in entries["sums"]["figure"]
    assert entries["graph"]["answer"] == "needs a GPU"


def test_the_stages_run_in_order_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import everything

    codes = {"first_contact.py": 0, "run.py": 1, "gpu.py": 3}
    ran: list[str] = []

    def stage(command: list[str], check: bool) -> Any:
        ran.append(Path(command[1]).name)
        assert command[2:] == ["--seconds", command[3], "--device", "cpu", "--results", str(tmp_path)]
        return subprocess.CompletedProcess(command, codes[ran[-1]])

    monkeypatch.setattr(everything.subprocess, "run", stage)
    monkeypatch.setattr(sys, "argv", ["everything.py", "--device", "cpu", "--results", str(tmp_path)])
    assert everything.main() == everything.LEFT
    assert ran == list(codes)
    codes["gpu.py"] = 0
    assert everything.main() == 1  # a test failed
    codes["first_contact.py"] = 2
    ran.clear()
    assert everything.main() == everything.NO_DEVICE and ran == ["first_contact.py"]
    monkeypatch.setattr(sys, "argv", ["everything.py", "--seconds", "30", "--results", str(tmp_path)])
    ran.clear()
    assert everything.main() == everything.LEFT and ran == []


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
    names = (
        "benchmarks.gpu.first_contact",
        "benchmarks.gpu.contact_cudnn",
        "benchmarks.gpu.contact_program",
        "benchmarks.gpu.gpu",
    )
    program = f"""
import importlib, importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rich", "tqdm", "platformdirs", "pulp", "hypothesis", "matplotlib", "mpi4py"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for name in {(*names, "benchmarks.gpu.worker", "benchmarks.gpu.everything")}:
    importlib.import_module(name)
from benchmarks.table import Table, show
show([Table("title", ("a", "b"), [("1", "2")])])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["**title**", "", "| a | b |", "| :-- | --: |", "| 1 | 2 |"]
