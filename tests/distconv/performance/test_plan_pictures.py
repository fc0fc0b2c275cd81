"""Pictures of plans and of scaling: every number drawn is one that the tables tell, with names, units and legends."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from torch import nn

from distconv.__main__ import main
from distconv.performance.choice import PartitionPlanner
from distconv.performance.imagined import imagined_job
from distconv.performance.layers import trace
from distconv.performance.machine import read_machine
from distconv.performance.pictures import plan_figure, save, scaling_figure
from distconv.performance.recording import on_meta
from distconv.settings.partition import Partition


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def network() -> nn.Module:
    widths = [3, 8, 16, 32, 64, 64]
    layers = [nn.Conv2d(a, b, 3, padding=1, stride=1 + (b > 8)) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))


def test_a_plan_is_drawn_with_its_times(tmp_path: Path) -> None:
    model, machine = on_meta(network), read_machine("lassen")
    graph = trace(model, (8, 3, 128, 128))
    found = [Partition.parse(text) for text in ("sample=4", "height=2,width=2", "channel=4")]
    with imagined_job(4):
        planner = PartitionPlanner(model, graph, found, machine)
        mixed = planner.whole({name: found[min(2, (at + 1) // 2)] for at, name in enumerate(graph.layers)})
        assert mixed is not None
        rows, uniform = planner.rows(mixed), planner.uniform()
    save(str(tmp_path / "plan.png"), lambda: plan_figure(mixed, rows, uniform, machine))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    figure = plan_figure(mixed, rows, uniform, machine)
    strip, times, steps = figure.axes
    assert [patch.get_width() for patch in strip.patches] == [1, 2, 2]  # layers of one partition, side by side
    assert len({patch.get_facecolor() for patch in strip.patches}) == 3
    for row in rows:
        drawn = sum(
            patch.get_height() for patch in times.patches if patch.get_x() < rows.index(row) + 0.5 < patch.get_x() + 1
        )
        assert drawn == pytest.approx(1e3 * (row.cost.compute + row.cost.exchange + row.moves + row.cost.gradients))
    widths = [patch.get_width() for patch in steps.patches]
    told = [mixed, *uniform]
    assert [a + b for a, b in zip(widths[: len(told)], widths[len(told) :], strict=True)] == pytest.approx(
        [1e3 * plan.times.total for plan in told]
    )
    said = texts(figure)
    assert {"sample=4", "channel=4", "redistribution", "ms per step", *graph.layers} <= {text.strip() for text in said}


def test_scaling_is_drawn(tmp_path: Path) -> None:
    points: list[dict[str, Any]] = [
        {"ranks": 1, "series": "samples alone", "seconds": 0.8, "samples_per_second": 10.0},
        {"ranks": 4, "series": "samples alone", "seconds": 0.4, "samples_per_second": 20.0},
        {"ranks": 4, "series": "height=2", "seconds": 0.2, "samples_per_second": 40.0},
        {"ranks": 8, "series": "height=2", "refused": "why"},
    ]
    left, right = scaling_figure(points, "lassen", weak=False).axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in left.lines}
    assert drawn["ideal"] == ([1, 4], [800, 200])
    assert drawn["samples alone"] == ([1, 4], [800, 400]) and drawn["height=2"] == ([4], [200])
    assert [list(line.get_ydata()) for line in right.lines][:2] == [[100, 50], [100]]


def test_a_picture_comes_with_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "scaling.svg"
    given = ["simulate", "alexnet", "--ranks", "1,2", "--batch", "2", "--machine", "lassen", "--json"]
    monkeypatch.setattr(sys, "argv", ["distconv", *given, "--picture", str(picture)])
    assert main() == 0
    assert len(json.loads(capsys.readouterr().out)["points"]) == 3
    assert "ms per step" in picture.read_text() and "samples alone" in picture.read_text()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("plan.txt", "accepted: a name that ends in .png, .svg or .pdf"), ("none/plan.png", "cannot write --picture")],
)
def test_a_picture_that_cannot_be_written_is_one_line(
    name: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["plan", "alexnet", "--ranks", "2", "--machine", "lassen", "--picture", str(tmp_path / name)]
    monkeypatch.setattr(sys, "argv", ["distconv", *given])
    assert main() == 2
    told = capsys.readouterr().err
    assert complaint in told and told.count("\n") == 1
