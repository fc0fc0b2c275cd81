"""Scripts that `distconv run --parts` computes in turn: what they print, and which options are refused."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.forked_python import run_python

SCRIPT = """
import sys, torch
from torch import nn

torch.manual_seed(0)
text, net = nn.Conv1d(2, 2, 3), nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()).double()
with torch.no_grad():
    text(torch.randn(1, 2, 9))
    y = net(torch.randn(1, 3, 16, 16).double())
print(type(y).__name__, round(y.sum().item(), 8), sys.argv[1:])
sys.exit(3)
"""


def test_a_script_in_turn_prints_what_it_prints_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    turned = run_python("-m", "distconv", "run", "--parts", "height=4", path, "-x")
    with mock.patch.object(sys, "argv", [str(path), "-x"]), pytest.raises(SystemExit):
        torch.set_default_dtype(torch.float32)
        runpy.run_path(str(path), run_name="__main__")
    assert turned.returncode == 3
    assert turned.stdout == capsys.readouterr().out
    assert turned.stderr.startswith("distconv: --parts: Conv1d runs whole: ") and turned.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--parts", "filter=2"), "would cut parameters"),
        (("--parts", "height=2", "--partition", "height=2"), "accepted: one of the two"),
        (("--parts", "height=2", "--batch-norm", "local"), "accepted: global"),
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
