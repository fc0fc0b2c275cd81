"""Pictures of plans and of memory, ready to be printed in a paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mucudnn.networks.plan import NetworkPlan, Row
from mucudnn.optimizer import Division, share
from mucudnn.reporting.run_file import Moment
from mucudnn.sizes import format_bytes

MIB = 2**20
WIDTH = 7.0  # Inches: two columns of text.

MOST_KERNELS = 6  # Kernels whose desirable sets are drawn, and whose curves have a name: those with most to gain.

MOST_ROWS = 36  # Kernels whose division is drawn: those that take longest.

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "savefig.dpi": 200,
}

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d31", "#6a51a3")
"""Distinct to the colour-blind (Okabe and Ito), and in grey."""

_STOCK = "#9a9a9a"
_FAINT = "#d0d0d0"


def desirable_sets(plan: NetworkPlan) -> Figure:
    """Time against workspace of every choice on record, for the kernels that gain most, and what was chosen."""
    rows = sorted(plan.rows, key=_gain, reverse=True)[:MOST_KERNELS]
    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(WIDTH, 0.5 + 2.05 * lines), layout="constrained")
    grid = np.ravel(figure.subplots(lines, columns, squeeze=False))
    for row, axes in zip(rows, grid, strict=False):
        stock, set_ = row.choices.stock, row.choices.desirable
        axes.axhline(stock.seconds * 1e3, color=_STOCK, linestyle="--", linewidth=0.8, label="torch's own kernel")
        undivided = [option for option in row.choices.undivided if option.seconds < 3 * stock.seconds]
        axes.scatter(
            [option.workspace / MIB for option in undivided],
            [option.seconds * 1e3 for option in undivided],
            s=16, facecolors="none", edgecolors=_COLOURS[4], linewidths=0.8, marker="s", label="undivided",
        )  # fmt: skip
        workspaces = [choice.workspace / MIB for choice in set_]
        seconds = [choice.seconds * 1e3 for choice in set_]
        axes.step(workspaces, seconds, where="post", color=_COLOURS[0], linewidth=1)
        axes.scatter(workspaces, seconds, s=9, color=_COLOURS[0], label="desirable set", zorder=3)
        axes.scatter(
            [row.choice.workspace / MIB], [row.choice.seconds * 1e3],
            s=70, marker="*", color=_COLOURS[1], edgecolors="black", linewidths=0.4, label="chosen", zorder=4,
        )  # fmt: skip
        _bytes_axis(axes, [*workspaces, *(option.workspace / MIB for option in undivided)])
        top = 1.08 * max([*seconds, *(option.seconds * 1e3 for option in undivided)])
        axes.set(ylim=(0, top), xlabel="workspace, MiB", ylabel="ms")
        axes.set_title(_title(row).replace(", ", "\n"), loc="left")
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles) or 1)
    return figure


def workspace_curves(plan: NetworkPlan) -> Figure:
    """The speed-up of every kernel within a limit, and the network's time by the three ways to give workspace."""
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = sorted({choice.workspace / MIB for row in plan.rows for choice in row.choices.desirable})
    end = max(sizes, default=0.0) * 1.3 or 1.0
    gaining = [row for row in sorted(plan.rows, key=_gain) if len(row.choices.desirable) > 1]
    by_name = {_title(row): row for row in gaining}  # of several of one name, the one that gains most
    for place, (name, row) in enumerate(sorted(by_name.items(), key=lambda item: -_gain(item[1]))):
        is_named = place < MOST_KERNELS
        left.step(
            [*(choice.workspace / MIB for choice in row.choices.desirable), end],
            [row.record.stock_seconds / s for s in (*(c.seconds for c in row.choices.desirable), row.fastest.seconds)],
            where="post",
            color=_COLOURS[place] if is_named else _FAINT,
            linewidth=1.2 if is_named else 0.7,
            zorder=3 if is_named else 2,
            label=name if is_named else None,
        )
    left.axhline(1, color=_STOCK, linestyle="--", linewidth=0.8)
    _bytes_axis(left, [*sizes, end])
    left.set(xlabel="workspace of the kernel, MiB", ylabel="speed-up over torch's own kernel")
    left.set_title("a  each kernel", loc="left")
    if by_name:
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", handlelength=1.2)

    kernels = [row.choices.desirable for row in plan.rows for _ in range(row.count)]
    most = sum(menu[-1].workspace for menu in kernels)
    least = min((choice.workspace for menu in kernels for choice in menu if choice.workspace), default=1)
    totals = np.unique(np.geomspace(least, max(most, least + 1), 40).astype(np.int64))
    stock = sum(menu[0].seconds for menu in kernels)
    for label, colour, style, times in (
        ("one workspace, reused (WR)", _COLOURS[0], "-", [_reused(kernels, total) for total in totals]),
        ("shares of it (WD)", _COLOURS[1], "-", [share(kernels, float(total)).seconds for total in totals]),
        ("equal parts of it", _COLOURS[4], ":", [_reused(kernels, total / len(kernels)) for total in totals]),
    ):
        right.plot(totals / MIB, [1e3 * seconds for seconds in times], style, color=colour, label=label)
    right.axhline(1e3 * stock, color=_STOCK, linestyle="--", linewidth=0.8, label="torch's own kernels")
    right.set_xscale("log", base=4)
    right.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _number(size)))
    right.set(ylim=(0, 1.3e3 * stock), xlabel="workspace of the whole network, MiB")
    right.set_ylabel("ms per step, all convolutions")
    right.set_title(f"b  the network, {len(kernels)} kernels", loc="left")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", handlelength=1.6)
    return figure


def network_division(plan: NetworkPlan) -> Figure:
    """The division of each kernel, its time beside that of torch's own kernel, and its workspace."""
    longest = sorted(plan.rows, key=lambda row: row.count * row.record.stock_seconds, reverse=True)[:MOST_ROWS]
    rows = [row for row in plan.rows if any(row is shown for shown in longest)]
    algorithms = dict.fromkeys(option.algorithm for row in rows for option in row.choice.options)
    others = [name for name in algorithms if name != "stock"]
    colours = {"stock": _STOCK} if "stock" in algorithms else {}
    colours |= {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(others)}
    figure = Figure(figsize=(WIDTH, 1.1 + 0.17 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    places = np.arange(len(rows))
    left.barh(
        places, [row.count * row.record.stock_seconds * 1e3 for row in rows],
        height=0.82, facecolor="none", edgecolor=_STOCK, linewidth=0.6,
    )  # fmt: skip
    for place, row in zip(places, rows, strict=True):
        start = 0.0
        for option in row.choice.options:
            width, colour = row.count * option.seconds * 1e3, colours[option.algorithm]
            left.barh(place, width, left=start, height=0.62, color=colour, edgecolor="white", linewidth=0.4)
            start += width
    right.barh(places, [row.choice.workspace / MIB for row in rows], height=0.62, color=_COLOURS[0])
    if plan.total is None and plan.limit < 2 * max((row.choice.workspace for row in rows), default=0):
        right.axvline(plan.limit / MIB, color="black", linestyle="--", linewidth=0.8)
        right.set_title(f"limit {format_bytes(plan.limit)}", loc="right")
    elif plan.total is not None:
        right.set_title(f"{format_bytes(plan.workspace)} of {format_bytes(plan.total)}", loc="right")
    left.set_yticks(places, [_title(row) for row in rows], fontsize=6)
    left.set(ylim=(len(rows) - 0.4, -0.6), xlabel="ms per step; one field per launch")
    right.set_xlabel("MiB, each kernel" if plan.total is not None else "MiB")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.tick_params(axis="y", length=0)
    named = [Patch(color=colour, label=algorithm) for algorithm, colour in colours.items()]
    outline = Patch(facecolor="none", edgecolor=_STOCK, label="torch's own kernel alone")
    figure.legend(handles=[*named, outline], loc="outside lower center", ncols=min(6, len(named) + 1))
    return figure


def memory_timeline(timeline: Sequence[Moment]) -> Figure:
    """The live memory at every convolution of a step, the workspace on top, and what each might have used."""
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    axes = figure.subplots()
    live = np.array([moment.live for moment in timeline]) / MIB
    used = live + np.array([moment.workspace for moment in timeline]) / MIB
    peak = float(live.max(initial=0))
    budget = live + np.array([moment.budget for moment in timeline]) / MIB
    edges = np.arange(len(timeline) + 1) - 0.5
    top = max(float(used.max(initial=0)), float(budget[np.isfinite(budget)].max(initial=0)), peak)
    axes.stairs(np.minimum(budget, 2 * top), edges, baseline=live, fill=True, color="#e8f1f8", label="budget")
    axes.stairs(used, edges, baseline=live, fill=True, color=_COLOURS[1], label="workspace")
    axes.stairs(live, edges, baseline=0, fill=True, color="#b8b8b8", label="live tensors")
    axes.axhline(peak, color="black", linestyle="--", linewidth=0.8, label="peak without workspace")
    axes.set(xlim=(-0.5, max(len(timeline) - 0.5, 0.5)), ylim=(0, 1.12 * top))
    axes.set(xlabel="convolution, in the order of the step", ylabel="MiB")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=4)
    return figure


def style() -> Any:
    """The context in which figures are drawn and saved."""
    return matplotlib.rc_context(STYLE)


def _reused(kernels: Sequence[Sequence[Division]], limit: float) -> float:
    """Seconds of all kernels, each within the limit."""
    return sum([c for c in menu if c.workspace <= limit][-1].seconds for menu in kernels)


def _gain(row: Row) -> float:
    return row.count * (row.record.stock_seconds - row.fastest.seconds)


def _title(row: Row) -> str:
    return f"{row.layer.name or 'convolution'}, {row.direction}{f' ×{row.count}' if row.count > 1 else ''}"


def _bytes_axis(axes: Axes, sizes: Sequence[float]) -> None:
    """A logarithmic axis of MiB on which zero has a place."""
    positive = [size for size in sizes if size > 0]
    least = min(positive, default=1.0)
    axes.set_xscale("symlog", base=2, linthresh=least, linscale=0.6)
    axes.set_xlim(-0.25 * least, 1.3 * max(positive, default=1.0))
    first, last = int(np.floor(np.log2(least))), int(np.ceil(np.log2(max(positive, default=1.0))))
    step = max(1, -(-(last - first) // 4))
    ticks = [0.0, *(2.0**power for power in range(first + 1, last + 1, step))]
    axes.set_xticks(ticks, [_number(tick) for tick in ticks])
    axes.minorticks_off()


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
