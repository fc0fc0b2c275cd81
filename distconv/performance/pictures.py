"""Pictures of a plan and of the scaling of a step, for people and for papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from distconv.performance.choice import LayerRow, StepPlan
from distconv.performance.machine import Machine
from mucudnn.networks.pictures import STYLE, WIDTH

COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#000000", "#f0e442")
"""Of partitions and curves; distinct to the colour-blind (Okabe and Ito), as the next ones are."""

_COMPUTING, _WAITING, _MOVING, _HIDING = "#9a9a9a", "#d55e00", "#e69f00", "#ffe4c0"
_OTHER = "#d9d9d9"
_MARKERS = "osD^vP*X"

TIMES: tuple[tuple[str, str, Callable[[LayerRow], float]], ...] = (
    ("computing", _COMPUTING, lambda row: row.cost.compute),
    ("waiting for halos, channels and statistics", _WAITING, lambda row: row.cost.exchange),
    ("redistribution", _MOVING, lambda row: row.moves),
    ("allreduce of gradients, mostly hidden", _HIDING, lambda row: row.cost.gradients),
)
"""What a layer's time is made of: its name, its colour, and seconds."""

MOST_NAMES = 64  # Layers that have their names below the strip; of more, some have.


def save(path: str, figure: Callable[[], Figure]) -> None:
    """Draws a figure and writes it, in the format that the name of the file ends in."""
    with matplotlib.rc_context(STYLE):
        figure().savefig(path)


def plan_figure(plan: StepPlan, rows: Sequence[LayerRow], uniform: Sequence[StepPlan], machine: Machine) -> Figure:
    """The layers as a strip coloured by partition, their times beneath, and whole steps beside single partitions."""
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    grid = figure.add_gridspec(3, 1, height_ratios=(0.45, 3, 1.5))
    strip, times, steps = (figure.add_subplot(grid[line]) for line in range(3))
    ranks = plan.layers[rows[0].name].ranks
    figure.suptitle(f"{ranks} ranks, {machine.name}", fontsize=8, x=0.01, ha="left")
    colours = _colours([str(row.partition) for row in rows])
    start = 0
    for partition, group in groupby(rows, key=lambda row: str(row.partition)):
        end = start + len(list(group))
        strip.barh(0, end - start, left=start, height=1, color=colours.get(partition, _OTHER), edgecolor="white")
        start = end
    strip.set_ylim(-0.5, 0.5)
    strip.set_axis_off()
    strip.set_title("a  partition of each layer, from input to output", loc="left")
    named = [Patch(color=colour, label=partition) for partition, colour in colours.items()]
    others = len({str(row.partition) for row in rows} - set(colours))
    named += [Patch(color=_OTHER, label=f"{others} others")] * (others > 0)
    figure.legend(handles=named, loc="outside upper right", ncols=min(5, len(named)))

    places = np.arange(len(rows)) + 0.5
    bottom = np.zeros(len(rows))
    for name, colour, seconds in TIMES:
        heights = 1e3 * np.array([seconds(row) for row in rows])
        heights[~np.isfinite(heights)] = 0
        times.bar(places, heights, bottom=bottom, width=0.84, color=colour, label=name)
        bottom += heights
    every = -(-len(rows) // MOST_NAMES)
    labels = [row.name if index % every == 0 else "" for index, row in enumerate(rows)]
    times.set_xticks(places, labels, rotation=90, fontsize=4.5 if len(rows) > 30 else 6)
    times.tick_params(axis="x", length=0)
    times.set_ylabel("ms per step and rank")
    times.set_title("b  time of each layer", loc="left")
    times.legend(loc="upper right", ncols=2)
    times.set_ylim(0, 1.4 * float(bottom.max(initial=0)) or 1)
    for axes in (strip, times):
        axes.set_xlim(0, len(rows))
    _whole_steps(steps, plan, uniform)
    return figure


def _whole_steps(axes: Axes, plan: StepPlan, uniform: Sequence[StepPlan]) -> None:
    singles = [other for other in uniform if other is not plan]
    chosen = "chosen for each layer" if len(set(plan.layers.values())) > 1 else f"chosen: {_single(plan)}"
    shown = [(chosen, plan), *((f"{_single(other)} for all", other) for other in singles)]
    places = np.arange(len(shown))
    waited = 1e3 * np.array([step.times.exposed for _, step in shown])
    total = 1e3 * np.array([step.times.total for _, step in shown])
    axes.barh(places, total - waited, height=0.66, color=_COMPUTING, label="computing, and the host")
    axes.barh(places, waited, left=total - waited, height=0.66, color=_WAITING, label="waiting for messages")
    for place, value in enumerate(total):
        axes.text(value, place, f" {value:.3g}", va="center", fontsize=7)
    axes.set_yticks(places, [name for name, _ in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * float(total.max()))
    axes.set_xlabel("ms per step")
    axes.set_title("c  whole steps", loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)


def _single(plan: StepPlan) -> str:
    return str(next(iter(plan.layers.values())))


def scaling_figure(points: Sequence[Mapping[str, Any]], machine: str, *, weak: bool) -> Figure:
    """Steps on growing numbers of ranks, and what share of them is of use.

    Args:
        points: with ``ranks``, ``series``, ``seconds``, ``samples_per_second``, and what `simulate` reports beside.
        weak: whether the batch grows with the ranks.
    """
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"{'weak' if weak else 'strong'} scaling, {machine}", fontsize=8, x=0.01, ha="left")
    found = [point for point in points if "seconds" in point]
    series = list(dict.fromkeys(str(point["series"]) for point in found))
    counts = sorted({int(point["ranks"]) for point in found})
    first = min(found, key=lambda point: (point["ranks"], point["seconds"]))
    per_rank = first["samples_per_second"] / first["ranks"]
    ideal = [1e3 * first["seconds"] * (1 if weak else first["ranks"] / ranks) for ranks in counts]
    left.plot(counts, ideal, color="#9a9a9a", linestyle="--", linewidth=0.8, label="ideal")
    for index, name in enumerate(series):
        own = sorted((point for point in found if point["series"] == name), key=lambda point: point["ranks"])
        look: dict[str, Any] = {
            "color": COLOURS[index % len(COLOURS)], "marker": _MARKERS[index % len(_MARKERS)], "markersize": 3.5,
        }  # fmt: skip
        ranks = [point["ranks"] for point in own]
        left.plot(ranks, [1e3 * point["seconds"] for point in own], label=name, **look)
        shares = [100 * point["samples_per_second"] / point["ranks"] / per_rank for point in own]
        right.plot(ranks, shares, **look)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts], rotation=45 if len(counts) > 7 else 0)
        axes.minorticks_off()
        axes.set_xlabel("ranks")
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.5)
        axes.set_axisbelow(True)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.yaxis.set_minor_formatter(NullFormatter())
    left.set_ylabel("ms per step")
    left.set_title("a  time", loc="left")
    right.axhline(100, color="#9a9a9a", linestyle="--", linewidth=0.8)
    right.set_ylim(bottom=0)
    right.set_ylabel("throughput per rank, %")
    right.set_title(f"b  efficiency, that of {_ranks(first['ranks'])} is 100 %", loc="left")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(series) + 1))
    return figure


def _ranks(number: int) -> str:
    return "one rank" if number == 1 else f"{number} ranks"


def _colours(partitions: Sequence[str]) -> dict[str, str]:
    """A colour for each partition, those of most layers first."""
    order = sorted(dict.fromkeys(partitions), key=partitions.count, reverse=True)
    return dict(zip(order, COLOURS, strict=False))
