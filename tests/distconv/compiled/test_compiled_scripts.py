"""Scripts that compile their model, under `distconv run`: what they print is what they print alone, uncompiled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ENVIRONMENT, SCRIPTS, launch

from mucudnn.convolution.problem import Direction
from mucudnn.reporting.record import Outcome
from tests.forked_python import run_python

SCRIPT = SCRIPTS / "compiled.py"


@pytest.fixture(scope="module")
def expected() -> list[dict[str, float]]:
    done = run_python(SCRIPT, env=ENVIRONMENT)
    (steps,) = json.loads(done.stdout)
    return list(steps)


def check(printed: str, ways: int, expected: list[dict[str, float]]) -> None:
    """One graph each way in the first step, none in those after it, and the numbers of the plain script."""
    trained = json.loads(printed)
    assert len(trained) == ways
    for steps in trained:
        for found, right in zip(steps, expected, strict=True):
            assert (found.pop("graphs"), found.pop("compiled"), found.pop("breaks")) == (1, 1, 0)
            assert found == pytest.approx({name: right[name] for name in found}, rel=1e-10, abs=1e-12)


def test_a_script_that_compiles_prints_what_it_prints_alone(expected: list[dict[str, float]]) -> None:
    ways = ("aot_eager", "function", "aot_eager", "method")
    done = launch("alone", 2, "--partition", "sample=2", str(SCRIPT), *ways)
    assert done.returncode == 0, done.stderr
    check(done.stdout, 2, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's default backend needs a C++ compiler")
def test_the_default_backend_and_mucudnn_serve_a_script(expected: list[dict[str, float]], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = launch(
        *("alone", 2, "--partition", "height=2", "--report", str(report), str(SCRIPT), "inductor", "function"),
        seconds=280,
        MUCUDNN_WORKSPACE_LIMIT="1MiB",
        MUCUDNN_DATABASE=str(tmp_path / "times.db"),
        TORCHINDUCTOR_COMPILE_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout, 1, expected)
    records = Outcome.from_json(json.loads(report.read_text())).records
    assert {record.direction for record in records} == set(Direction)


COMPILED_FIRST = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
made = lambda: torch.nn.Sequential(torch.nn.Conv2d(2, 4, 1), torch.nn.Flatten(), torch.nn.Linear(16, 5))
inputs = torch.ones(4, 2, 2, 2)
torch.compile(made(), backend="aot_eager", fullgraph=True)(inputs).sum().backward()
import distconv
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
model = distconv.parallelize(made(), distconv.init("sample=2,channel=2", device_type="cpu"))
y = torch.compile(model, backend="aot_eager", fullgraph=True)(inputs)
y.sum().backward()
print(y.to_local().shape)
"""


def test_what_was_compiled_before_distconv_was_imported_hides_no_rule() -> None:
    done = run_python("-c", COMPILED_FIRST, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.Size([2, 3])"


def test_a_compiled_function_leaves_the_models_that_it_calls_to_ranks() -> None:
    done = subprocess.run(  # a forked process has imported Dynamo
        [sys.executable, SCRIPTS / "traced.py"], env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, False]


def test_a_script_that_compiles_its_steps_prints_what_it_prints_alone() -> None:
    script = SCRIPTS / "compiled_steps.py"
    expected = run_python(script, env=ENVIRONMENT)
    done = launch("alone", 2, "--partition", "channel=2", str(script))
    assert done.returncode == 0, done.stderr
    found = [float(line) for line in done.stdout.split()]
    assert len(found) == 12
    assert found == pytest.approx([float(line) for line in expected.stdout.split()], rel=1e-10)
    assert "runs without it: it calls a model of the job" in done.stderr
    assert "backward runs without it on ranks" in done.stderr
