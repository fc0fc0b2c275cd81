"""Draws the tables of benchmarks/results that have more than ten rows, as pictures for docs/measured.md.

    python benchmarks/draw.py        # writes docs/measured/*.svg; needs matplotlib (the extra plot)

Nothing is measured: every point is a figure of the files in benchmarks/results, which the benchmarks write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
PICTURES = Path(__file__).resolve().parent.parent / "docs" / "measured"

BLUE, ORANGE, GREEN, FAINT = "#0072b2", "#e69f00", "#009e73", "#b8b8b8"
STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mucudnn",  # the same figures give the same file
}
WIDTH = 7.5
ROW = 0.16
"""Inches of a picture's width, and of its height for each row."""


def results(name: str) -> Any:
    """The figures that a benchmark kept."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(axes: Axes, names: Sequence[str]) -> None:
    """Gives each row its name, the first at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", linewidth=0.4, color="#e0e0e0")
    axes.set_axisbelow(True)


def tall(count: int, columns: int = 1, **more: Any) -> tuple[Figure, Any]:
    """A figure with so many rows."""
    figure = Figure(figsize=(WIDTH, 1.1 + ROW * count), layout="constrained")
    return figure, figure.subplots(1, columns, **more)


def layers() -> Figure:
    """How many times as fast as torch's own kernel each layer is: undivided, and divided within the same limit."""
    found = results("layers-cpu")
    figure, axes = tall(len(found))
    for index, row in enumerate(found):
        taken = row["division"] != "stock"
        slower, faster = sorted((row["undivided_speedup"], row["divided_speedup"]))
        axes.plot([slower, faster], [index, index], color=FAINT, linewidth=1, zorder=1)
        axes.plot(row["undivided_speedup"], index, "o", color=ORANGE, markersize=3.5)
        axes.plot(row["divided_speedup"], index, "D" if taken else "x", color=BLUE, markersize=3.5)
    for marker, colour, label in (
        ("o", ORANGE, "best undivided algorithm within the limit"),
        ("D", BLUE, "mucudnn: divided, or another algorithm"),
        ("x", BLUE, "mucudnn: left to torch's kernel"),
    ):
        axes.plot([], [], marker, color=colour, markersize=3.5, label=label)
    axes.axvline(1, color="#303030", linewidth=0.6)
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.set_xlabel("times as fast as torch's own kernel (forward and both backward passes)")
    rows(axes, [f"{row['group']} {row['name']}{_limit(row)}" for row in found])
    axes.legend(loc="lower right")
    return figure


def _limit(row: dict[str, Any]) -> str:
    """The limit of a layer that was measured within several."""
    if row["group"] not in ("large", "volume"):
        return ""
    return ", unlimited" if row["limit"] == math.inf else f", {row['limit'] / 2**20:.3g} MiB"


CASES = {
    "conv": "convolution, 32 channels 512²",
    "conv-small": "convolution, 16 channels 64²",
    "block": "ResNet-18 block, 64 channels 56²",
    "unet": "3-D U-Net, width 16, 64³",
}


def distributed() -> Figure:
    """How many times as fast as one process the ranks are, over each transport."""
    found = results("distributed-cpu")["speed"]
    figure, axes = tall(3 * len(found))
    for index, row in enumerate(found):
        for shift, (transport, colour) in enumerate((("Gloo", BLUE), ("MPI", GREEN))):
            ratio = row["seconds"]["one process"] / row["seconds"][transport]
            axes.barh(index + 0.36 * (shift - 0.5), ratio, 0.34, color=colour, label=None if index else transport)
            axes.text(ratio + 0.02, index + 0.36 * (shift - 0.5), f"{ratio:.2f}", va="center", fontsize=7)
    axes.axvline(1, color="#303030", linewidth=0.6)
    axes.set_xlabel("times as fast as one process (forward and backward, one thread per rank, two cores)")
    rows(axes, [f"{CASES[row['case']]}\n{row['ranks']} ranks: {row['partition']}" for row in found])
    axes.legend(loc="lower right")
    return figure


DRAWN = {
    "layers-cpu": layers,
    "distributed-cpu": distributed,
}


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in DRAWN.items():
            draw().savefig(PICTURES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
