"""Scripts and checks within a limit of all memory, by the commands that a user runs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distconv.__main__ import main

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[m for c in (2, 8, 8, 8) for m in (nn.Conv2d(c, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())])
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
x = torch.randn(2, 2, 64, 64)
for _ in range(2):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), torch.ones(2, 8, 64, 64))
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command of distconv, and gives its exit code."""

    def command(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["distconv", *words])
        return main()

    return command


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_within_a_limit(script: str, run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(SCRIPT, script, "exec"), {})
    expected = capsys.readouterr().out
    assert run("run", "--memory", "2MiB", script) == 0
    found = capsys.readouterr()
    assert found.out == expected
    assert re.search(r"--memory 2MiB: Sequential runs whole, .*: at most 1\.\d MiB \(3\.\d MiB whole\)", found.err)


EXHAUSTED = """
import os
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

class Exhausts(nn.Module):
    def forward(self, x):
        if not isinstance(x, FakeTensor) and os.path.exists(os.environ["FAILS"]):
            os.remove(os.environ["FAILS"])  # A file is not the model's state, which is put back.
            raise torch.OutOfMemoryError("out of memory")
        return x * 2

model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), Exhausts(), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
print(*model(torch.ones(1, 1, 64, 64)).shape)
"""


def test_a_call_that_ran_out_of_memory_is_chosen_anew(
    tmp_path: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails").touch()
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    (tmp_path / "exhausted.py").write_text(EXHAUSTED)
    assert run("run", "--memory", "1GiB", str(tmp_path / "exhausted.py")) == 0
    found = capsys.readouterr()
    assert found.out == "1 1 64 64\n"
    assert "ran out of memory, once more" in found.err
    assert "cannot be followed" not in found.err


def test_a_check_shows_the_ways_to_fit(
    script: str, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ((), ("--parts", "auto")):
        assert run("check", *words, "--memory", "2MiB", script) == 0
        shown = capsys.readouterr().out
        assert "Sequential within 2.0 MiB" in shown and "have the rest of the limit" in " ".join(shown.split())
    assert run("check", "--json", "--memory", "10KiB", script) == 1
    (call,) = json.loads(capsys.readouterr().out)
    assert [way["fits"] for way in call["ways"]] == [False] * len(call["ways"])
    Path(script).write_text("import torch\ndef net(): return torch.nn.Conv2d(1, 2, 1)\n")
    assert run("check", f"{script}:net", "--input", "1,1,16,16", "--memory", "auto") == 0
    assert "Conv2d within" in capsys.readouterr().out
    assert run("check", f"{script}:net", "--input", "3,3,16,16", "--memory", "1GiB") == 1
    assert "Conv2d runs whole, as it cannot be followed: RuntimeError" in capsys.readouterr().err
    Path(script).write_text(
        "import torch\ntorch.nn.L1Loss()(torch.ones(1, 3, 8, 8, requires_grad=True), torch.ones(1, 3, 8, 8))"
    )
    assert run("check", "--memory", "1KiB", script) == 1
    assert sum(" whole " in row for row in capsys.readouterr().out.splitlines() if row.startswith("│")) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--partition", "channel=2"), "--partition: partition 'channel=2': the axis 'channel' would cut parameters"),
        (("--partition", "height=2", "--shard-data"), "--memory and --partition with --shard-data: inputs are whole"),
        (("--partition", "sample=2", "--batch-norm", "local"), "with --batch-norm local; accepted: global"),
        (("--partition", "auto"), "--memory with --partition auto, which chooses without a limit"),
    ],
)
def test_what_does_not_go_with_a_limit_of_each_ranks_memory(
    words: tuple[str, ...], said: str, script: str, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", *words, "--memory", "1GiB", script) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


@pytest.mark.parametrize("words", [(), ("--partition", "height=2")])
def test_one_limit_of_all_memory_is_accepted(
    words: tuple[str, ...],
    script: str,
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUCUDNN_MEMORY_LIMIT", "1GiB")
    assert run("run", *words, "--memory", "1GiB", script) == 2
    found = capsys.readouterr().err
    assert "--memory with MUCUDNN_MEMORY_LIMIT: --memory counts workspaces, too" in found and found.count("\n") == 1


def test_a_check_of_ranks(script: str, run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "--memory", "1GiB", "--partition", "height=2", "--shard-parameters", script) == 2
    assert "check --memory with --shard-parameters" in capsys.readouterr().err
    assert run("check", "--memory", "1GiB", "--partition", "channel=2", script) == 2
    assert "the axis 'channel' would cut parameters" in capsys.readouterr().err

    def least(*words: str) -> int:
        assert run("check", "--json", "--memory", "1GiB", *words, script) == 0
        (call,) = json.loads(capsys.readouterr().out)
        return min(way["peak"] for way in call["ways"])

    assert 0.4 * least() < least("--partition", "height=2") < 0.8 * least()
