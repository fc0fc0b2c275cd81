"""The demo's limits, verdict and tables; the demo itself is `make demo`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.providers.fft import FFT, Fft
from mucudnn.providers.onednn import ONEDNN, OneDnn
from mucudnn.reporting.record import Record
from mucudnn.sizes import parse_bytes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "demo"


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import demo

        yield demo
    finally:
        sys.path.remove(str(BENCHMARKS))


def option(arguments: tuple[str, ...], name: str) -> int:
    return int(arguments[arguments.index(name) + 1])


@pytest.mark.parametrize("direction", Direction)
def test_the_fourier_transform_of_the_slices_fits_only_in_parts(demo: Any, direction: Direction) -> None:
    batch, width = option(demo.SLICES, "--batch"), option(demo.SLICES, "--width")
    problem = ConvProblem.of_convolution(
        direction, (batch, width, 64, 64), (width, width, 31, 31), stride=(1, 1), padding=(15, 15), dilation=(1, 1)
    )
    limit = parse_bytes(demo.SLICES_LIMIT)
    assert Fft().workspace(problem, FFT) > limit
    assert Fft().workspace(problem.with_extent(batch // 4), FFT) <= limit


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
def test_onednn_on_a_quarter_of_the_volume_fits_only_in_parts(demo: Any) -> None:
    depth, height, width = (int(size) for size in demo.VOLUME[-1].split("x"))

    def slab(rows: int) -> ConvProblem:
        """The second convolution of the network on a rank: some rows of depth, between halos of one element."""
        shape = 1, 8, rows + 2, height // 2 + 2, width
        return ConvProblem.of_convolution(
            Direction.FORWARD, shape, (16, 8, 3, 3, 3), stride=(1, 1, 1), padding=(0, 0, 1), dilation=(1, 1, 1)
        )

    limit = parse_bytes(demo.VOLUME_LIMIT)
    assert OneDnn().workspace(slab(depth // 2), ONEDNN) > limit
    assert OneDnn().workspace(slab(1), ONEDNN) <= limit


# What the demo says of its runs.

PROBLEM = ConvProblem.of_convolution(
    Direction.FORWARD, (8, 2, 9, 9), (2, 2, 3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
)
CUT = Record(PROBLEM, "forward", 100, ((4, "fft"), (4, "fft")), 0.5, 2.0, 2.0, workspace=60, whole_workspace=110)
WHOLE = replace(CUT, parts=((8, "stock"),), seconds=2.0, workspace=0, whole_workspace=0)


def runs(demo: Any, float64: float = 0.5, cut: bool = True) -> list[Any]:
    """Plain, undivided, divided; plain and divided in float64, whose last loss is the one given."""

    def run(name: str, seconds: float, plans: list[Record] | None, last: float = 0.5) -> Any:
        record = {"losses": [1.0, last], "median_seconds": seconds, "dice": {"grey matter": 0.7}}
        return demo.Run(name, record, plans, ())

    plans = [WHOLE, CUT if cut else WHOLE]
    return [
        run("plain", 2.0, None),
        run("undivided", 2.0, [WHOLE, WHOLE]),
        run("divided", 0.5, plans),
        run("plain, float64", 2.0, None),
        run("divided, float64", 0.5, plans, last=float64),
    ]


def test_the_tables_have_a_column_per_arm_and_say_what_was_cut(demo: Any) -> None:
    side_by_side, cut = demo.tables("title", runs(demo))
    rows = {row[0]: row[1:] for row in side_by_side.rows}
    assert side_by_side.headings == ("", "plain", "undivided", "divided")
    assert rows["over plain"] == ("1.00x", "1.00x", "4.00x")
    assert rows["convolutions divided"] == ("-", "0 of 2", "1 of 2")
    assert rows["largest workspace"] == ("torch's own", "0 B", "60 B")
    assert cut.rows == [(str(PROBLEM), "forward", "2xfft(4)", "4.00x", "60 B", "110 B")]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"float64": 0.5 + 1e-12}, ""),
        ({"float64": 0.5 + 1e-6}, "losses in float64 differ"),
        ({"cut": False}, "no convolution was divided"),
    ],
)
def test_the_demo_fails_where_it_does_not_show_what_it_is_to_show(
    demo: Any, changed: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo._verdict({"slices": runs(demo, **changed)}) == int(bool(said))
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == int(bool(said))


def test_figures_are_kept_of_both_parts_only(demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--only", "slices", "--save"])
    with pytest.raises(SystemExit, match="2"):
        demo.main()
    assert "--save keeps both parts" in capsys.readouterr().err
