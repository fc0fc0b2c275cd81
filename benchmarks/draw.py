"""Draws the tables of benchmarks/results that have more than ten rows, as pictures for docs/measured.md.

    python benchmarks/draw.py        # writes docs/measured/*.svg; needs matplotlib (the extra plot)

Nothing is measured: every point is a figure of the JSON files in benchmarks/results, which the benchmarks write.
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
from matplotlib.lines import Line2D

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

LIMIT_KIB = 64 * 1024


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


def channels() -> Figure:
    """Megabytes that all ranks send in a step of a layer whose channels are split, and what the formula says."""
    found = results("distributed-cpu")["channels"]
    figure, axes = tall(len(found))
    for index, row in enumerate(found):
        axes.barh(index, row["sent"] / 1e6, 0.7, color=FAINT, label=None if index else "sent")
        axes.plot(row["formula"] / 1e6, index, "|", color=BLUE, markersize=9, label=None if index else "formula")
    axes.set_xlabel("MB that all ranks send in a step of a 3x3 convolution")
    names = []
    for row in found:
        inputs, outputs, side = row["layer"]
        names.append(f"{inputs} to {outputs}, {side}²: {row['algorithm']}, {row['partition']}")
    rows(axes, names)
    axes.legend(loc="lower right")
    return figure


def sharing() -> Figure:
    """Seconds that a decision of the optimizer takes, and the most it should."""
    found = results("sharing-cpu")["solved"]
    figure, axes = tall(len(found))
    for index, row in enumerate(found):
        axes.plot([row["seconds"], row["target"]], [index, index], color=FAINT, linewidth=1, zorder=1)
        axes.plot(row["seconds"], index, "o", color=BLUE, markersize=4, label=None if index else "taken")
        axes.plot(row["target"], index, "|", color=ORANGE, markersize=9, label=None if index else "target")
    axes.set_xscale("log")
    axes.set_xlabel("seconds")
    rows(axes, [f"{row['decision']}, {row['method']}" for row in found])
    axes.legend(loc="upper right")
    return figure


ARMS = (
    ("float32, strict", "float32", {"DOWN_CONVERT_INPUTS", "TENSOR_CORE"}),
    ("TF32", "float32", {"DOWN_CONVERT_INPUTS"}),
    ("float64", "float64", {"DOWN_CONVERT_INPUTS"}),
    ("float16", "float16", {"DOWN_CONVERT_INPUTS"}),
    ("bfloat16", "bfloat16", {"DOWN_CONVERT_INPUTS"}),
)
"""What is computed in, the type of the operands, and the notes of engines that torch's settings then refuse."""


def over_the_limit(kept: dict[str, Any]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Layers by arm, memory format and direction.

    Returns:
        How many have an engine that needs more than 64 MiB at the largest mini-batch, and how many of these one that
        needs no more at another.
    """
    whole = kept["batches"].index(max(kept["batches"]))
    counts = {}
    for arm, dtype, refused in ARMS:
        refused_kinds = {number for number, notes in enumerate(kept["notes"]) if refused.intersection(notes)}
        for memory_format in ("contiguous", "channels_last"):
            for direction in ("forward", "backward_data", "backward_filter"):
                over = fits = 0
                for cases in kept["layers"].values():
                    sizes = _sizes(cases, f"{direction} {dtype} {memory_format}", refused_kinds)
                    too_much = [row for row in sizes if (row[whole] or 0) > LIMIT_KIB]
                    over += bool(too_much)
                    fits += any(size is not None and size <= LIMIT_KIB for row in too_much for size in row)
                counts[arm, memory_format, direction] = over, fits
    return counts


def _sizes(cases: dict[str, Any], case: str, refused: set[int]) -> list[list[int | None]]:
    """The workspace of each kind of engine at each mini-batch, in KiB; None where it does not serve."""
    kinds = cases.get(case, {})
    if kinds == "as float16":
        kinds = cases[case.replace("bfloat16", "float16")]
    split = [kind.split() for kind in kinds]
    return [[None if size == "None" else int(size) for size in row[1:]] for row in split if int(row[0]) not in refused]


def engines() -> Figure:
    """Layers with a cuDNN engine above 64 MiB of workspace, and those of them where it fits the parts."""
    kept = results("engines-h200")
    counts = over_the_limit(kept)
    figure, axes = tall(len(counts))
    for index, (over, fits) in enumerate(counts.values()):
        axes.barh(index, over, 0.7, color=FAINT, label=None if index else "an engine needs more than 64 MiB")
        axes.barh(
            index, fits, 0.4, color=BLUE, label=None if index else "such an engine fits when the mini-batch is cut"
        )
    axes.set_xlabel(f"layers, of {len(kept['layers'])}, at a mini-batch of {max(kept['batches'])}")
    rows(axes, [", ".join(name).replace("_", " ") for name in counts])
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
    return figure


PLANS = {
    "samples": ("samples alone", ORANGE, 5.0),
    "single": ("best single partition", GREEN, 2.8),
    "strategy": ("a partition for each layer", BLUE, 0.9),
}
MACHINES = {"lassen": ("nodes of 4 V100", "-"), "h100": ("nodes of 8 H100", "--")}
"""What is planned, with its colour and width, so that equal ones show beneath each other, and the machines' lines."""


def scaling() -> Figure:
    """Simulated milliseconds of a step over the GPUs, for each network: plans that fit a GPU's memory."""
    found = results("scaling")["rows"]
    networks = list(dict.fromkeys(row["network"] for row in found))
    figure = Figure(figsize=(WIDTH, 2.1 * math.ceil(len(networks) / 3)), layout="constrained")
    grid = iter(figure.subplots(math.ceil(len(networks) / 3), 3, squeeze=False).flat)
    counts = sorted({row["ranks"] for row in found})
    for network, axes in zip(networks, grid, strict=False):
        for machine, (_, line) in MACHINES.items():
            mine = [row for row in found if (row["network"], row["machine"]) == (network, machine)]
            for plan, (_, colour, width) in PLANS.items():
                drawn = [row for row in mine if row[plan] is not None and row[plan]["fits"]]
                times = [1e3 * row[plan]["seconds"] for row in drawn]
                style = {"color": colour, "linewidth": width, "marker": "o", "markersize": 2 + width}
                axes.plot([row["ranks"] for row in drawn], times, line, **style)
        axes.set_title(f"{network}, {next(row['batch'] for row in found if row['network'] == network)} samples")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(counts, [str(count) for count in counts], rotation=45)
        axes.minorticks_off()
        axes.grid(linewidth=0.4, color="#e0e0e0")
    for axes in grid:
        axes.set_axis_off()
    figure.supxlabel("GPUs")
    figure.supylabel("ms a step, simulated")
    named = [Line2D([], [], color=of, linewidth=width, label=name) for name, of, width in PLANS.values()]
    named += [Line2D([], [], linestyle=line, color="#303030", label=name) for name, line in MACHINES.values()]
    figure.legend(handles=named, loc="outside upper center", ncols=3)
    return figure


DRAWN = {
    "layers-cpu": layers,
    "distributed-cpu": distributed,
    "channels-cpu": channels,
    "sharing-cpu": sharing,
    "engines-h200": engines,
    "scaling": scaling,
}


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in DRAWN.items():
            draw().savefig(PICTURES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
