"""Pictures: what is drawn is what was planned, and files come out."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from test_network_plan import HERE, MIB, NETWORK, known, problem, rows, settings

from mucudnn.__main__ import main
from mucudnn.networks import layers, pictures
from mucudnn.networks.layers import LayerCall
from mucudnn.networks.plan import NetworkPlan, plan
from mucudnn.reporting.run_file import Moment, Outcome
from mucudnn.timing.store import Store

TIMELINE = [Moment("a", 10 * MIB, 2 * MIB, 5 * MIB), Moment("b", 15 * MIB, 0, math.inf), Moment("c", 4 * MIB, MIB, 9e6)]


def planned(**given: Any) -> NetworkPlan:
    layers = [LayerCall("a", problem(16), 3), LayerCall("b", problem(16, 3), 1)]
    return plan(
        layers, known((layers[0].problem, rows(16)), (layers[1].problem, rows(16, stock=9.0))), settings(**given)
    )


def drawn(axes: Axes, label: str) -> np.ndarray:
    """The points of a scatter or a line by its label."""
    for artist in (*axes.collections, *axes.lines):
        if artist.get_label() == label:
            return np.asarray(artist.get_offsets() if artist in axes.collections else artist.get_xydata())
    raise LookupError(label)


def test_desirable_sets_show_what_can_be_chosen_and_what_was() -> None:
    found = planned(workspace_limit=4 * MIB)
    with pictures.style():
        axes = pictures.desirable_sets(found).axes
    assert [a.get_title(loc="left") for a in axes] == ["b\nforward", "a\nforward ×3"]
    for row, one in zip(sorted(found.rows, key=lambda row: row.layer.name, reverse=True), axes, strict=True):
        points = [(c.workspace / MIB, c.seconds * 1e3) for c in row.choices.desirable]
        np.testing.assert_allclose(drawn(one, "desirable set"), points)
        np.testing.assert_allclose(drawn(one, "chosen"), [(row.choice.workspace / MIB, row.choice.seconds * 1e3)])


def test_curves_of_the_network() -> None:
    found = planned(total_workspace_size=16 * MIB)
    with pictures.style():
        _, network = pictures.workspace_curves(found).axes
    reused, shares, equal = (
        drawn(network, label) for label in ("one workspace, reused (WR)", "shares of it (WD)", "equal parts of it")
    )
    assert (reused[:, 1] <= shares[:, 1] + 1e-9).all() and (shares[:, 1] <= equal[:, 1] + 1e-9).all()
    for size, milliseconds in shares[::8]:
        again = planned(total_workspace_size=int(size * MIB))
        assert again.seconds * 1e3 == pytest.approx(milliseconds, rel=1e-6)


def test_divisions_have_a_field_per_launch() -> None:
    found = planned(workspace_limit=4 * MIB)
    with pictures.style():
        times, workspaces = pictures.network_division(found).axes
    assert len(times.patches) == len(found.rows) + sum(len(row.choice.options) for row in found.rows)
    assert [bar.get_width() for bar in workspaces.patches] == [row.choice.workspace / MIB for row in found.rows]


def test_a_timeline_has_live_memory_workspace_and_budget() -> None:
    with pictures.style():
        (axes,) = pictures.memory_timeline(TIMELINE).axes
    by_label = {patch.get_label(): patch.get_data() for patch in axes.patches}
    assert by_label["live tensors"].values.tolist() == [10, 15, 4]
    assert by_label["workspace"].values.tolist() == [12, 15, 5]
    assert by_label["budget"].values[0] == 15
    assert drawn(axes, "peak without workspace")[0, 1] == 15


def test_the_command_writes_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, folder = str(tmp_path / "times.sqlite"), tmp_path / "new" / "pictures"
    store = Store(path)
    for layer in layers.convolutional(layers.find(NETWORK).build, (16, 3, 21, 21)):
        store.record({**layer.problem.launch_key(), **HERE.launch_key()}, rows(16))
    store.close()
    report = tmp_path / "plans.json"
    report.write_text(json.dumps(Outcome([], TIMELINE).to_json()))
    arguments = ["--input", "3,21,21", "--batch", "16", "--database", path, "--report", str(report)]
    assert main(["plot", NETWORK, *arguments, "--total", "20MiB", "--output", str(folder)]) == 0
    written = sorted(file.name for file in folder.iterdir())
    names = ("desirable", "division", "timeline", "workspace")
    assert written == [f"{name}.{suffix}" for name in names for suffix in ("png", "svg")]
    assert capsys.readouterr().out.splitlines() == [
        str(folder / f"{name}.{suffix}") for name in ("desirable", "workspace", "division", "timeline")
        for suffix in ("png", "svg")
    ]  # fmt: skip
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)
    assert "2.same" in (folder / "division.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a NETWORK, or --report FILE"),
        (["--report", "missing.json"], "cannot read missing.json"),
        (["--report", "{empty}"], "has no timeline"),
        (["--report", "{full}", "--output", "{full}"], "cannot write to --output"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], words: str
) -> None:
    for name, timeline in (("empty", []), ("full", TIMELINE)):
        (tmp_path / name).write_text(json.dumps(Outcome([], timeline).to_json()))
    with pytest.raises(SystemExit) as ended:
        main(["plot", *(text.format(empty=tmp_path / "empty", full=tmp_path / "full") for text in arguments)])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_without_matplotlib_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["plot", "--report", "plans.json"])
    assert "pip install 'mucudnn-distconv[plot]'" in capsys.readouterr().err
