"""The figures that pages show are those that were measured, and the pictures show what was drawn."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.pages import rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_figures_of_single_convolutions() -> None:
    told = rows((ROOT / "docs" / "measured.md").read_text(), "convolution")
    kept = [row for row in results("layers-cpu") if row["group"] in ("large", "volume")]
    assert len(told) == len(kept)
    for (_, limit, *speedups), row in zip(told, kept, strict=True):
        if limit != "unlimited":
            assert float(limit.removesuffix(" MiB")) == pytest.approx(row["limit"] / 2**20, abs=0.05)
        for text, key in zip(speedups, ("undivided_speedup", "divided_speedup"), strict=True):
            number = text.removesuffix("x")
            digits = len(number.partition(".")[2])
            assert f"{row[key]:.{digits}f}" == number, (row["name"], key)


def test_the_figures_of_parameters_in_shards() -> None:
    told = rows((ROOT / "docs" / "measured.md").read_text(), "partition")
    for cells, row in zip(told, results("distributed-cpu")["wide"], strict=True):
        whole, held, reduced, sent = (
            figure / 2**20 for figure in (row["whole"], max(row["held"]), max(row["reduced"]), max(row["sent"]))
        )
        assert cells[0] == f"`{row['partition']}`"
        numbers = [float(cell.removesuffix(" MiB")) for cell in cells[1:]]
        assert numbers == pytest.approx([whole, held, held / whole, reduced, sent], abs=0.051)


def test_the_figures_of_the_first_steps() -> None:
    told = rows((ROOT / "docs" / "measured.md").read_text(), "program")
    found = results("planning-found-cpu")
    for (name, *cells), (program, arms) in zip(told, results("planning-cpu").items(), strict=True):
        assert f"`{program}`" in name
        expected = []
        for mark in 10, 50:
            sums = {arm: [sum(one["seconds"][:mark]) for one in rounds] for arm, rounds in arms.items()}
            is_met = len(arms["stock"][0]["seconds"]) >= mark
            over = (statistics.median(sums[arm]) / statistics.median(sums["stock"]) for arm in ("live", "ahead"))
            expected += [f"{ratio:.2f}" if is_met else "-" for ratio in over]
        pairs = zip(found[program]["live"], found[program]["ahead"], strict=True) if program in found else ()
        ratios = [live / ahead for live, ahead in pairs]
        assert cells == [*expected, f"{statistics.median(ratios):.2f}" if ratios else "-"]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("draw")


def test_what_is_drawn_is_shown(draw: Any) -> None:
    shown = re.findall(r"\(measured/([\w-]+)\.svg\)", (ROOT / "docs" / "measured.md").read_text())
    assert sorted(shown) == sorted(path.stem for path in draw.PICTURES.glob("*.svg"))
    assert set(draw.DRAWN) <= set(shown)  # what drew the others has been removed
    for figure in draw.DRAWN.values():
        (axes,) = figure().axes
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert len(names) == len(axes.get_yticks()) and len(set(names)) == len(names)
