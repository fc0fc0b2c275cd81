"""What a program prints in calls that are computed in parts, or followed."""

from __future__ import annotations

import contextlib
import io
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

import distconv
from distconv.turns.output import muted


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.texts: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        print("mean", round(x.mean().item(), 6), x.shape)
        with contextlib.redirect_stdout(io.StringIO()) as own:
            print("kept")
            x = self.second(x)
        self.texts.append(own.getvalue())
        sys.stdout.writelines(["a\n", "b\n"])
        return x


@pytest.mark.parametrize("how", ["parts", "memory"])
def test_a_model_prints_once_as_in_a_plain_call(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, x = Printing(), torch.randn(2, 2, 32, 32)
    model(x).sum().backward()
    expected, model.texts = capsys.readouterr().out, []
    model = distconv.in_turn(model, "height=4") if how == "parts" else distconv.fit(model, 4 * x.nbytes)
    model(x).sum().backward()
    assert capsys.readouterr().out == expected
    assert model.texts == ["kept\n"]
    print("after")
    assert capsys.readouterr().out == "after\n"


def test_other_threads_print_while_one_is_muted(capsys: pytest.CaptureFixture[str]) -> None:
    with muted():
        print("this")
        other = threading.Thread(target=print, args=("other",))
        other.start()
        other.join()
    print("then")
    assert capsys.readouterr().out == "other\nthen\n"
