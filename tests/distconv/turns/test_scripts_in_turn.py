"""Scripts that `distconv run --parts` computes in turn: what they print, and which options are refused."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from jobs import WAYS, launch

from tests.forked_python import run_python

ON_RANKS = ("--partition", "sample=2")

TRAINING = """
import os, sys, torch
from torch import nn

torch.manual_seed(0)
layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 4, 3, stride=2)
net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(12, 3, 16, 16).double(), torch.randint(4, (12,)))
for x, target in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
    loss = nn.functional.cross_entropy(net(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.10f}")
torch.save(net.state_dict(), sys.argv[1])
print(f"{sum(x.double().sum().item() for x in torch.load(sys.argv[1]).values()):.8f} {torch.rand(1).item():.8f}")
if len(sys.argv) > 2:
    rank = torch.distributed.distributed_c10d.get_rank
    net[0].register_forward_hook(lambda *_: None if rank() < 3 else 1 / 0)
    net(x)
"""

SCRIPT = """
import sys, torch
from torch import nn

torch.manual_seed(0)
text, lazy = nn.Conv1d(2, 2, 3), nn.LazyConv2d(2, 3)
net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()).double()
net.register_forward_hook(lambda _, given, y: y * (2 + torch.distributed.is_initialized()))
with torch.no_grad():
    text(torch.randn(1, 2, 9)), lazy(torch.randn(1, 2, 9, 9))
    y = net(torch.randn(1, 3, 16, 16).double())
print(type(y).__name__, round(y.sum().item(), 8), sys.argv[1:], flush=True)
net.register_forward_hook(lambda _, given, y: y.retain_grad())
net(torch.randn(1, 3, 16, 16).double())
"""


def test_a_script_in_turn_prints_what_it_prints_alone_until_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    turned = run_python("-m", "distconv", "run", "--parts", "height=4", "--summary", path, "-x")
    with mock.patch.object(sys, "argv", [str(path), "-x"]):
        torch.set_default_dtype(torch.float32)
        runpy.run_path(str(path), run_name="__main__")
    assert turned.returncode == 2
    assert turned.stdout == capsys.readouterr().out
    whole, lazy, refused = turned.stderr.splitlines()
    assert whole.startswith("distconv: --parts: Conv1d runs whole: ")
    assert lazy == "distconv: --parts: LazyConv2d runs whole: its lazy modules become ordinary ones in this call"
    assert refused.startswith(f"distconv: {path}:13: parts in turn: retain_grad() within a model's call; accepted: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--parts", "filter=2"), "would cut parameters"),
        (("--parts", "height=2", "--batch-norm", "local"), "accepted: global"),
        (("--parts", "height=2", "--backend", "gloo"), "accepted: one of the two"),
        (("--parts", "height=2", *ON_RANKS, "--batch-norm", "local"), "accepted: global"),
        (("--parts", "height=2", *ON_RANKS, "--shard-data"), "with --shard-data: parts are cut from whole inputs"),
        (("--parts", "height=2", *ON_RANKS, "--channel-algorithm", "x"), "with --channel-algorithm: parts share"),
        (("--parts", "height=2", "--partition", "channel=2"), "'channel' would cut parameters"),
        (("--parts", "filter=2", *ON_RANKS), "'filter' would cut parameters"),
        (("--parts", "height=2", "--partition", "auto"), "accepted: both named"),
        (("--parts", "height=2", "--results", "host", *ON_RANKS), "--results host on ranks"),
        (("--results", "host", *ON_RANKS), "--results host on ranks"),
        (("--parts", "height=2", "--memory", "much", *ON_RANKS), "memory 'much': accepted: bytes"),
    ],
)
def test_options_that_do_not_go_with_parts_are_refused(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from distconv.__main__ import main

    monkeypatch.setattr(sys, "argv", ["distconv", "run", *words, "script.py"])
    assert main() == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_a_training_script_in_turn_whose_parameters_are_sharded_prints_what_it_prints_alone(tmp_path: Path) -> None:
    path, saved = tmp_path / "script.py", str(tmp_path / "state.pt")
    path.write_text(TRAINING.replace("8, 4, 3", "512, 4, 3").replace("(3, 8", "(3, 512").replace("2d(8)", "2d(512)"))
    alone = run_python(path, saved)
    options = ("--partition", "height=2", "--parts", "sample=2", "--shard-parameters")
    turned = launch("alone", 2, *options, str(path), saved)
    assert turned.returncode == 0, turned.stderr
    assert turned.stdout == alone.stdout and alone.stdout.count("\n") == 4


@pytest.mark.parametrize("way", WAYS)
def test_a_training_script_on_ranks_in_turn_prints_what_it_prints_alone(way: str, tmp_path: Path) -> None:
    path, saved = tmp_path / "script.py", str(tmp_path / "state.pt")
    path.write_text(TRAINING)
    alone = run_python(path, saved)
    options = ("--partition", "sample=2", "--parts", "sample=2,height=2", "--memory", "1MiB", "--summary")
    turned = launch(way, 2, *options, str(path), saved)
    assert turned.returncode == 0, turned.stderr
    assert turned.stdout == alone.stdout and alone.stdout.count("\n") == 4
    summary, sent = turned.stderr.splitlines()
    assert "2 ranks (sample=2), each with parts sample=2,height=2 in turn, 3 steps: memory of a rank" in summary
    assert "a rank sent at most" in sent and "per step; ranks waited for others" in sent


def test_a_failure_in_one_part_ends_the_job_with_one_traceback(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(TRAINING)
    ended = launch("alone", 2, "--partition", "height=2", "--parts", "height=2", str(path), str(tmp_path / "x"), "fail")
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1 and "ZeroDivisionError" in ended.stderr
