"""What a run says at its end: the convolutions that were called, the time saved, and what to type next."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forced import PART_SECONDS, STOCK_SECONDS, Forced
from test_report import DIVIDED, STOCK, record

import mucudnn
from mucudnn.reporting.record import NEXT, NOTHING_CALLED, Outcome, gained

ROOT = Path(__file__).parents[2]
TRIED = replace(STOCK, trials=4, cost=0.5)
WHOLE = record((67, "fft"), seconds=0.01, calls=100)


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Outcome([]), [NOTHING_CALLED]),
        (Outcome([], called=3), ["3 convolutions called (by shape and direction): 3 by torch's own kernel", NEXT]),
        (
            Outcome([replace(DIVIDED, calls=100), WHOLE, TRIED, STOCK], called=5),
            [
                "5 convolutions called (by shape and direction): 1 divided, 1 undivided by a faster algorithm, 1 "
                "tried, by torch's own kernel so far, 2 by torch's own kernel; workspace at most 3 MiB of 64 MiB",
                "about 5.5 s saved in this run against torch's own kernels, by times taken in turn, 4 trials included",
                NEXT,
            ],
        ),
        (
            Outcome([TRIED]),
            [
                "1 convolution called (by shape and direction): 1 tried, by torch's own kernel so far",
                "about 0.5 s lost in this run against torch's own kernels, by times taken in turn, 4 trials included; "
                "what these found is kept for the next run",
                NEXT,
            ],
        ),
        (
            Outcome([replace(WHOLE, spread=2.5), replace(TRIED, trials=1)]),
            [
                "2 convolutions called (by shape and direction): 1 undivided by a faster algorithm, 1 tried, by "
                "torch's own kernel so far; workspace at most 3 MiB of 64 MiB",
                "what this run has saved or lost is not known, 1 trial included: torch's own kernels were timed too "
                "seldom, or took unlike times; what these found is kept for the next run",
                NEXT,
            ],
        ),
    ],
    ids=["nothing", "too few calls", "gained", "lost", "unlike times"],
)
def test_the_sentences(outcome: Outcome, told: list[str]) -> None:
    assert gained(outcome) == told


def test_the_file_that_was_written_comes_next() -> None:
    assert gained(Outcome([STOCK]), "plans.json")[-1] == "next: python -m mucudnn report plans.json"


def test_calls_are_counted() -> None:
    x, w = torch.randn(4, 2, 9, 9), torch.randn(4, 2, 3, 3)
    with mucudnn.patched(board=Forced("gemm"), database=":memory:", planning="ahead") as session:
        for _ in range(3):
            torch.conv2d(x, w)
        torch.conv2d(x, w, stride=2)
    assert [record.calls for record in session.records()] == [3, 1]
    first = session.records()[0]
    assert first.saved == pytest.approx(first.seen * (STOCK_SECONDS / (2 * PART_SECONDS) - 1)) and first.seen > 0


def test_convolutions_that_are_called_once_are_met(own_database: Path) -> None:
    with mucudnn.patched(planning="live") as session:
        for n in (8, 9, 10, 10, 10):
            torch.conv2d(torch.zeros(1, 1, n, n), torch.zeros(1, 1, 3, 3))
    assert session.outcome().called == 3


def test_a_terminal_shows_a_line(tmp_path: Path) -> None:
    script = tmp_path / "three.py"
    script.write_text(
        "import torch\nfor n in (8, 9, 10):\n    torch.conv2d(torch.zeros(1, 1, n, n), torch.zeros(1, 1, 3, 3))\n"
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mucudnn", "run", str(script)]
    subprocess.run(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, timeout=240, check=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "3 convolutions called" in shown and shown.count("mucudnn: ") == 2
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=240, check=True)
    assert piped.stderr == b""
