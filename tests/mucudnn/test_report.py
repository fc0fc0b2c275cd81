"""Records: their words, their tables and their JSON."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

import mucudnn
from mucudnn.commands.output import show
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.optimizer import Option
from mucudnn.reporting.record import Record, from_json, to_json
from mucudnn.reporting.tables import known_tables, summary, table
from mucudnn.timing.logbook import Environment

PROBLEM = ConvProblem.of_convolution(
    Direction.BACKWARD_FILTER, (67, 3, 32, 32), (8, 3, 5, 5), stride=(2, 1), padding=(2, 2), dilation=(1, 1)
)


def record(*parts: tuple[int, str], **changes: Any) -> Record:
    values: dict[str, Any] = {
        "problem": PROBLEM,
        "direction": "backward_filter",
        "limit": 64 * 2**20,
        "parts": parts or ((67, "stock"),),
        "seconds": 0.01,
        "undivided_seconds": 0.02,
        "stock_seconds": 0.04,
        "workspace": 3 << 20,
    }
    return Record(**values | changes)


DIVIDED = record((16, "fft"), (16, "fft"), (16, "fft"), (16, "fft"), (3, "gemm"))
STOCK = record(seconds=0.04, undivided_seconds=0.04, workspace=0, limit=math.inf)


def text(shown: Table, width: int = 300) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


@pytest.mark.parametrize(
    ("parts", "short"),
    [
        (DIVIDED.parts, "4xfft(16) + gemm(3)"),
        (((67, "stock"),), "stock(67)"),
        (((32, "fft"), (32, "gemm"), (3, "gemm")), "fft(32) + gemm(32) + gemm(3)"),
    ],
)
def test_a_division_in_short(parts: tuple[tuple[int, str], ...], short: str) -> None:
    assert record(*parts).division == short


def test_json_keeps_everything() -> None:
    records = [DIVIDED, STOCK]
    through = json.loads(json.dumps(to_json(records), allow_nan=False))
    assert from_json(through) == records
    assert isinstance(from_json(through)[0].problem.direction, Direction)


def test_a_table_has_a_row_per_record() -> None:
    shown = table([DIVIDED, STOCK], names=["first", "second"], wide=True)
    assert shown.row_count == 2
    first, second = (line for line in text(shown).splitlines() if "67x3" in line)
    assert cells(first) == [
        "first",
        str(PROBLEM),
        "backward filter",
        "4xfft(16) + gemm(3)",
        "10.000",
        "2.00x",
        "4.00x",
        "3 MiB",
        "64 MiB",
    ]
    narrow = text(table([DIVIDED], names=["layer"]), width=80)
    assert all(number in narrow for number in ("10.000", "4.00x", "3 MiB")) and "2.00x" not in narrow
    assert "second" in second and "unlimited" in second
    alone = text(table([DIVIDED]))
    assert "layer" not in alone and alone.startswith("workspace limit 64 MiB")
    assert table([]).row_count == 0


def test_a_summary_adds_up() -> None:
    once = summary([DIVIDED, STOCK])
    assert "2 convolutions, 1 of them divided" in once
    assert "50.000 ms predicted, 1.60x the speed of torch's own kernels (80.000 ms)" in once
    weighted = summary([DIVIDED, STOCK], counts=[3, 1])
    assert "70.000 ms predicted, 2.29x the speed of torch's own kernels (160.000 ms)" in weighted
    assert "1.43x that of the best undivided algorithms within the limit (100.000 ms)" in weighted
    assert summary([]) == "No convolution was called."
    assert summary([], called=3).startswith(
        "3 convolutions called, by shape and direction, each too seldom to be timed"
    )


def test_a_summary_shows_what_is_saved_and_what_limits() -> None:
    saving = replace(DIVIDED, whole_workspace=80 << 20)
    told = summary([saving, STOCK], counts=[3, 1])
    assert "Workspace of the divided ones: 3 MiB at most, undivided up to 80 MiB, which 1 could not have" in told
    assert "3 MiB instead of 80 MiB" in told
    assert "1 of them, 57% of the time, stays with torch's own kernel" in told
    assert "Workspace" not in summary([STOCK]) and "stay" not in summary([DIVIDED])


def test_what_a_database_holds() -> None:
    one = Environment("cpu a", 1, False, "fp32", "torch")
    two = Environment("cpu a", 2, False, "fp32", "torch")
    options = [Option(n, "fft", 1e-3, n << 20) for n in (1, 2, 3, 8)] + [Option(8, "division 2xfft", 1.0, 0)]
    contents = [
        ({**PROBLEM.launch_key(), **one.launch_key()}, options),
        ({**PROBLEM.launch_key(), **two.launch_key()}, [Option(4, "stock", 2e-3, 0)]),
    ]
    first, second = known_tables((json.loads(json.dumps(key)), launches) for key, launches in contents)
    (row,) = (line for line in text(first).splitlines() if "fft" in line)
    assert cells(row)[1:] == ["backward filter", "fft", "1-3 8", "0.125", "8", "8 MiB"]
    assert str(PROBLEM.with_extent(1)) in row
    assert "threads 1" in text(first) and "threads 2" in text(second)


def test_the_function_of_this_name_is_the_package_s() -> None:
    assert mucudnn.report() == []


def test_what_is_still_explored_is_said() -> None:
    """Neither a gain nor what nothing beats: torch's own kernel computes it until something is settled."""
    exploring = replace(STOCK, trials=5, cost=-4.77, leader="fft", leader_seconds=0.005, tries=(("fft", 5),))
    slower, untried = replace(STOCK, trials=2, leader=""), replace(STOCK, leader="")
    told = summary([exploring, slower, untried])
    assert "Still exploring 2 of them" in told and "fft about 8.0 times as fast so far in backward filter of" in told
    assert "1 of them was called too seldom for anything to be tried" in told
    assert "nothing within the limit beats" not in told and "4.770 s less than torch's own" in told
    wide = text(table([exploring], wide=True))
    assert "stock(67), so far fft 8.0x" in wide and "+4770.0" in wide and "fft 5 times" in wide


def test_a_share_that_is_not_all_is_not_100_percent() -> None:
    told = summary([STOCK, replace(DIVIDED, seconds=1e-6)])
    assert "1 of them, over 99% of the time, stays with torch's own kernel" in told


@pytest.mark.parametrize("tty", [False, True])
def test_tables_fit_100_columns(tty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless details are wanted; into a pipe sentences are not broken."""
    exploring = replace(DIVIDED, trials=5, leader="fft", leader_seconds=0.005, tries=(("fft", 5), ("gemm", 12)))
    names, sentence = ["encoder.stages.3.block.convolution"] * 2, "a sentence of many words " * 9
    monkeypatch.setenv("COLUMNS", "200")
    lengths = []
    for wide in (False, True):
        file = io.StringIO()
        monkeypatch.setattr(file, "isatty", lambda: tty)
        show(file, table([exploring, STOCK], names, wide), sentence, wide=wide)
        lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()]
        rows = [line for line in lines if "sentence" not in line]
        lengths.append(max(map(len, rows)))
        assert (sentence.strip() in lines) is not tty
        assert ("+" in "".join(rows) and "gemm 12 times" in "".join(rows)) is wide
    assert lengths[0] <= 100 < lengths[1]
