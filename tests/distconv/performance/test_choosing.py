"""The mesh and the strategy that ranks choose for a model: in a program, under a launcher, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ENVIRONMENT, SCRIPTS, launch
from ranks import Ranks
from torch import nn

import distconv
from distconv.model.automatic import write_model
from distconv.model.choosing import Question
from distconv.performance.automatic import PartitionChoice, choose_partitions, main
from distconv.performance.first_call import ModelCall
from distconv.performance.kept import Kept
from distconv.performance.machine import machine_toml, read_machine
from distconv.performance.recording import on_meta
from tests.forked_python import forked_python, run_python


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder in which a machine of two ranks is kept, with memory for what they run if they shard parameters."""
    folder = tmp_path_factory.mktemp("cache")
    machine = read_machine("lassen")
    (folder / "mucudnn").mkdir()
    small = replace(machine, node=replace(machine.node, ranks=2), device=replace(machine.device, memory=3e5))
    (folder / "mucudnn" / "machine.toml").write_text(machine_toml(small))
    return str(folder)


SHARDED = "sample=2, with --shard-parameters; predicted"


def test_ranks_of_a_launcher_run_under_what_is_chosen(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = run_python(SCRIPTS / "chosen.py", env=ENVIRONMENT)
    done = launch("torchrun", 2, "--partition", "auto", str(SCRIPTS / "chosen.py"), seconds=240, XDG_CACHE_HOME=cache)
    assert done.returncode == 0, done.stderr
    assert [*map(float, done.stdout.split())] == pytest.approx([*map(float, plain.stdout.split())], abs=3e-6)
    assert done.stderr.count("; predicted ") == 1 and SHARDED in done.stderr


def test_a_program_runs_under_what_is_chosen(cache: str) -> None:
    program = [forked_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*program, str(SCRIPTS / "chosen_program.py")], env={**ENVIRONMENT, "XDG_CACHE_HOME": cache}, text=True,
        capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second == "partition ('sample',) (2,), 2 parameters in shards"
    assert done.stderr.count("distconv: strategy auto: ") == 1 and SHARDED in done.stderr


def test_what_was_chosen_is_kept(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the model, its input and the question; a different one is asked anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    chosen: list[int] = []

    def decide(*_: Any) -> PartitionChoice:
        chosen.append(1)
        return PartitionChoice({"*": "sample=2"}, 1.0, 2.0)

    monkeypatch.setattr("distconv.performance.automatic.decide", decide)
    kept, question = Kept(), Question("model", "", 2, 2, 1)
    for build, shape in (
        (lambda: nn.Conv2d(3, 8, 3), (2, 3, 8, 8)),
        (lambda: nn.Conv2d(3, 8, 3), (2, 3, 8, 8)),
        (lambda: nn.Conv2d(3, 8, 1), (2, 3, 8, 8)),
        (lambda: nn.Conv2d(3, 8, 3), (4, 3, 8, 8)),
    ):
        choice = choose_partitions(ModelCall(on_meta(build), (shape,), True), question, kept)
        assert choice.strategy == {"*": "sample=2"} and (choice.seconds, choice.alone) == (1.0, 2.0)
    assert len(chosen) == 3
    choose_partitions(ModelCall(on_meta(lambda: nn.Conv2d(3, 8, 3)), ((4, 3, 8, 8),), trains=False), question, kept)
    assert len(chosen) == 4


def test_a_doubted_choice_is_not_kept(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    chosen = [PartitionChoice({"*": "sample=2"}, 1.0, 9.0, doubted=True), PartitionChoice({"*": "height=2"}, 1.0, 2.0)]
    monkeypatch.setattr("distconv.performance.automatic.decide", lambda *_: chosen.pop(0))
    kept, question = Kept(), Question("model", "", 2, 2, 1)
    call = ModelCall(on_meta(lambda: nn.Conv2d(3, 8, 3)), ((2, 3, 8, 8),), True)
    assert "so the machine was busy; not kept" in str(choose_partitions(call, question, kept))
    assert [str(choose_partitions(call, question, kept)) for _ in range(2)] == [
        "height=2; predicted 1000.0 ms a step, one process 2000.0 ms"
    ] * 2


def test_a_fault_of_planning_is_one_line(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> PartitionChoice:
        raise KeyError("no such layer")

    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setattr("distconv.performance.automatic.decide", fails)
    write_model(str(tmp_path / "model"), nn.Conv2d(3, 8, 3), ((2, 3, 8, 8),))
    question = Question("model", str(tmp_path / "model"), 2, 2, 1)
    assert main(json.dumps(asdict(question)), str(tmp_path / "answer")) == 0
    refusal = json.loads((tmp_path / "answer").read_text())["refusal"]
    assert refusal.startswith("KeyError: 'no such layer' (test_choosing.py:")


class Counting(nn.Module):
    """Its result depends on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int((x > 0).sum().clamp(max=1))]


class Locked(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(3, 8, 3)
        self.lock = threading.Lock()


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "no sample": (nn.Identity, None, "sample_input None; accepted: a whole input"),
    "a list of a shape and what is none": (nn.Identity, [(4, 3, 8, 8), 3], "sample_input [(4, 3, 8, 8), 3]; accepted"),
    "a matrix": (nn.Identity, (4, 3), "sample_input (4, 3); accepted: a whole input"),
    "a lock": (Locked, (4, 3, 8, 8), "Locked cannot be given to a process: TypeError: cannot pickle '_thread.lock'"),
}


def refusals(name: str, cache: str) -> list[str]:
    os.environ["XDG_CACHE_HOME"] = cache
    found = []
    mesh = distconv.init("auto", device_type="cpu")
    model, sample, _ = REFUSED[name]
    for call in (
        lambda: distconv.shard(torch.zeros(4, 3, 8, 8), mesh),
        lambda: distconv.parallelize(model(), mesh),
        lambda: distconv.parallelize(model(), mesh, strategy="best"),
        lambda: distconv.parallelize(model(), mesh, strategy="auto", sample_input=sample),
        lambda: distconv.init("auto", ranks=[0]),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        found.append(str(raised.value))
    return found


@pytest.mark.parametrize(
    ("build", "shape", "ranks_of_all", "complaint"),
    [
        (Counting, (4, 3, 8, 8), 2, "Counting does not run on an input (4, 3, 8, 8) without data"),
        (lambda: nn.Conv2d(1, 1, 1), (1, 1, 1, 1), 2, "2 ranks: no partition of so many divides an input (1, 1, 1, 1)"),
        (lambda: nn.Conv2d(1, 1, 1), (1, 1, 8, 8), 6, "6 ranks, 3 of them on this machine"),
    ],
)
def test_a_process_that_chooses_answers_in_one_line(
    build: Any, shape: tuple[int, ...], ranks_of_all: int, complaint: str, cache: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    write_model(str(tmp_path / "model"), build(), (shape,))
    local = 2 if ranks_of_all == 2 else 3
    question = Question("model", str(tmp_path / "model"), ranks_of_all, local, 1)
    assert main(json.dumps(asdict(question)), str(tmp_path / "answer")) == 0
    refusal = json.loads((tmp_path / "answer").read_text())["refusal"]
    assert refusal.startswith(complaint) and "\n" not in refusal


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_chosen_is_one_line_on_every_rank(name: str, cache: str, ranks: Callable[[int], Ranks]) -> None:
    told, other = ranks(2).run(refusals, name, cache)
    assert told == other and all("\n" not in line for line in told)
    assert "call that before the mesh is used" in told[0] and told[0] == told[1]
    assert told[2] == "strategy 'best': accepted: auto, or patterns of layer names and partitions"
    assert told[3].startswith("strategy 'auto': ") and REFUSED[name][2] in told[3]
    assert "leave out ranks=" in told[4]
