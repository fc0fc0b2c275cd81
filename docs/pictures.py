"""Draws docs/idea.svg, the picture of the README: what mucudnn and distconv do to a convolution.

python docs/pictures.py        # needs matplotlib (the extra plot); the same input gives the same file
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

PICTURE = Path(__file__).with_name("idea.svg")

BLUE, ORANGE, GREEN, PINK = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
"""Colours that the colour-blind tell apart (Okabe and Ito)."""

FAINT, INK = "#d0d0d0", "#303030"

STYLE: dict[str, Any] = {"font.size": 8, "svg.hashsalt": "mucudnn", "figure.facecolor": "white"}

SAMPLES, PARTS = 8, 4
UNDIVIDED, LIMIT, DIVIDED = 8.0, 3.0, 2.0
"""Workspace that the fast algorithm needs for all samples, what is allowed, and what it needs for two samples."""


def box(axes: Axes, left: float, bottom: float, width: float, height: float, colour: str, **more: Any) -> None:
    """A filled rectangle with a thin white edge."""
    look = {"facecolor": colour, "edgecolor": "white", "linewidth": 1.0, **more}
    axes.add_patch(Rectangle((left, bottom), width, height, **look))


def micro_batches(axes: Axes) -> None:
    """Workspace over time: the whole mini-batch needs more than the limit, its micro-batches reuse what is allowed."""
    axes.set_title("mucudnn: a convolution in micro-batches, within a workspace limit", fontsize=9, loc="left")
    for start, parts, label in (
        (0.0, 1, "the whole mini-batch:\ndoes not fit"),
        (10.5, PARTS, "four micro-batches:\nfit"),
    ):
        size = SAMPLES // parts
        for part in range(parts):
            left = start + part * (size + 0.3)
            for sample in range(size):
                box(axes, left + sample, -1.7, 1, 1, BLUE)
            height = UNDIVIDED if parts == 1 else DIVIDED
            colour = FAINT if parts == 1 else GREEN
            box(axes, left, 0, size, height, colour, hatch="///" if parts == 1 else None)
        axes.text(start, -2.1, label, va="top", color=INK)
    axes.text(4.0, 5.2, "workspace of the\nfast algorithm", ha="center", color=INK, backgroundcolor="white")
    axes.text(14.9, 2.15, "the same workspace, four times", ha="center", color=INK, fontsize=7)
    axes.axhline(LIMIT, color=ORANGE, linestyle="--", linewidth=1.4)
    axes.text(20.1, LIMIT + 0.25, "limit", ha="right", color=ORANGE)
    axes.text(-0.4, -1.2, "samples", ha="right", va="center", color=INK)
    axes.text(-0.4, 4.0, "workspace", ha="right", va="center", color=INK)
    axes.set_xlim(-4.2, 20.4)
    axes.set_ylim(-4.4, 8.4)
    axes.set_axis_off()


def shards(axes: Axes) -> None:
    """A map over four ranks, and the halo that one of them fetches from its neighbours before it convolves."""
    axes.set_title("distconv: a tensor in shards, one per rank, with halos", fontsize=9, loc="left")
    side, halo = 4.0, 0.7
    for rank, colour in enumerate((BLUE, ORANGE, PINK, "#56b4e9")):
        row, column = divmod(rank, 2)
        left, bottom = column * side, (1 - row) * side
        box(axes, left, bottom, side, side, colour, alpha=0.55)
        axes.text(left + side / 2, bottom + side / 2, f"rank {rank}", ha="center", va="center", color=INK)
    # The halo of rank 0: the strips of its neighbours that its kernel reads.
    look = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.8, "hatch": "xxxx"}
    axes.add_patch(Rectangle((side, side), halo, side, **look))
    axes.add_patch(Rectangle((0, side - halo), side + halo, halo, **look))
    for start, end in (((5.6, 7.3), (3.6, 7.3)), ((0.7, 2.4), (0.7, 4.4)), ((5.5, 2.5), (3.7, 4.3))):
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=INK, linewidth=1.2))
    axes.text(8.4, 7.6, "Each rank holds and computes\nits part of every activation.", va="top", color=INK)
    axes.text(
        8.4,
        5.4,
        "The halo (hatched): elements\nof the neighbours that rank 0's\nkernel reads. They are sent\n"
        "before it convolves; their\ngradients are sent back.",
        va="top",
        color=INK,
    )
    axes.text(8.4, 1.2, "Its local convolution passes\nthrough mucudnn.", va="top", color=INK)
    axes.set_xlim(-0.2, 15.6)
    axes.set_ylim(-0.6, 8.3)
    axes.set_aspect("equal")
    axes.set_axis_off()


def main() -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 2.9), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1))
        micro_batches(left)
        shards(right)
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
