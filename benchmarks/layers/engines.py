"""Which engines of cuDNN serve the networks' convolutions on an H200, and with how much workspace at which batch.

python benchmarks/layers/engines.py    # all networks; needs no GPU, but the extra cudnn-test and a C compiler
python benchmarks/layers/engines.py --networks alexnet --batches 64,256 --output somewhere

Plans are finalized for a card that is not there, through the graphs that serve programs. Nothing is timed. Prints a
table, and saves it in benchmarks/results/engines-h200.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.layers.elsewhere import H200, card_of, wheel_library
from benchmarks.layers.layer import Layer, convolutions
from benchmarks.networks import NETWORKS
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.providers.cudnn.backend import Behavior, NumericalNote
from mucudnn.providers.cudnn.device import PlannedCard
from mucudnn.providers.cudnn.form import form
from mucudnn.providers.cudnn.graph import OperationGraph
from mucudnn.providers.cudnn.library import CudnnError, Library, Unavailable, spelled

DTYPES = ("float32", "float64", "float16", "bfloat16")
FORMATS = ("contiguous", "channels_last")
LIMIT = 64 * 2**20
MIB = 2**20
RESULTS = Path(__file__).resolve().parents[1] / "results" / "engines-h200"


class NoCard:
    """Makes plans for a GPU that is not there; nothing runs."""

    def __init__(self, library: Library) -> None:
        self.library, self.device = library, card_of(library, H200)

    def planning(self) -> AbstractContextManager[PlannedCard]:
        return nullcontext(self.device)

    def handle(self) -> c_void_p:
        raise RuntimeError("there is no card")

    def scratch(self, size: int) -> torch.Tensor:
        raise RuntimeError("there is no card")

    def is_current(self) -> bool:
        return True

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()


def problem_of(layer: Layer, direction: Direction, dtype: str, memory_format: str) -> ConvProblem:
    return ConvProblem.of_convolution(
        direction,
        layer.input,
        layer.weight,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=layer.groups,
        transposed=layer.transposed,
        output_padding=layer.output_padding,
        dtype=dtype,
        formats=(memory_format,) * 3,
    )


def served(place: NoCard, problem: ConvProblem) -> dict[int, dict[str, Any]]:
    """The engines that serve a problem, knobs at their defaults: workspace in bytes and numerical notes."""
    put = form(problem)
    found: dict[int, dict[str, Any]] = {}
    if put is None:
        return found
    try:
        graph = OperationGraph(place.library, place.device, put, accumulate=False)
    except CudnnError:
        return found
    for index in range(graph.engines):
        try:
            engine = graph.engine(index)
            if Behavior.RUNTIME_COMPILATION in engine.behavior:
                continue  # it compiles a kernel and loads it, which needs a driver
            plan = graph.plan(engine)
        except CudnnError:
            continue
        found[index] = {"workspace": plan.workspace, "notes": sorted(engine.notes)}
    return found


def survey(place: NoCard, layers: list[tuple[str, Layer]], batches: list[int]) -> list[dict[str, Any]]:
    """A row per layer, direction, type and memory format."""
    cases = [
        (network, layer, direction, dtype, memory_format)
        for network, layer in layers
        for direction in Direction
        for dtype in DTYPES
        for memory_format in FORMATS
    ]
    rows = []
    for network, layer, direction, dtype, memory_format in tqdm(cases, unit="case", disable=None):
        problem = problem_of(layer, direction, dtype, memory_format)
        engines: dict[int, dict[str, Any]] = {}
        for batch in batches:
            for index, known in served(place, problem.with_extent(batch)).items():
                row = engines.setdefault(index, {"notes": known["notes"], "workspace": {}})
                row["workspace"][batch] = known["workspace"]
        rows.append(
            {
                "network": network,
                "layer": layer.name,
                "problem": str(replace(problem, dtype="float32", formats=("contiguous",) * 3)),
                "direction": str(direction),
                "dtype": dtype,
                "format": memory_format,
                "engines": engines,
            }
        )
    return rows


def allowed(row: dict[str, Any], tf32: bool) -> dict[int, dict[str, Any]]:
    """The engines that torch's settings let serve."""
    refused = {NumericalNote.DOWN_CONVERT_INPUTS} | (
        {NumericalNote.TENSOR_CORE} if row["dtype"] == "float32" and not tf32 else set()
    )
    return {index: known for index, known in row["engines"].items() if not refused.intersection(known["notes"])}


def summary(rows: list[dict[str, Any]], largest: int) -> list[list[str]]:
    """By type, memory format and direction: how many engines serve, and how many layers have one above the limit."""
    lines = []
    arms = [("float32", False), ("float32", True), *((dtype, True) for dtype in DTYPES[1:])]
    for dtype, tf32 in arms:
        for memory_format in FORMATS:
            for direction in Direction:
                chosen = [
                    r for r in rows if (r["dtype"], r["format"], r["direction"]) == (dtype, memory_format, direction)
                ]
                counts, over, rescued = [], 0, 0
                most = 0
                for row in chosen:
                    engines = allowed(row, tf32).values()
                    counts.append(len(engines))
                    needs = [known["workspace"].get(largest) for known in engines]
                    most = max([most, *(need for need in needs if need is not None)])
                    too_much = [known for known in engines if known["workspace"].get(largest, 0) > LIMIT]
                    over += bool(too_much)
                    rescued += any(min(known["workspace"].values()) <= LIMIT for known in too_much)
                name = dtype if dtype != "float32" else ("TF32" if tf32 else "float32, strict")
                median = sorted(counts)[len(counts) // 2] if counts else 0
                lines.append(
                    [
                        name,
                        memory_format,
                        str(direction),
                        str(len(chosen)),
                        str(median),
                        f"{most / MIB:,.0f}",
                        str(over),
                        str(rescued),
                    ]
                )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="all", help="names separated by commas (default: all)")
    parser.add_argument("--batches", default="16,256", help="mini-batches, ascending (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="path without suffix (default: results/engines-h200)"
    )
    options = parser.parse_args()
    names = list(NETWORKS) if options.networks == "all" else options.networks.split(",")
    unknown = [name for name in names if name not in NETWORKS]
    try:
        batches = [int(batch) for batch in options.batches.split(",")]
    except ValueError:
        batches = []
    if unknown or not batches or min(batches) < 1:
        wrong = (
            f"--networks {unknown[0]}: accepted are {', '.join(NETWORKS)}"
            if unknown
            else f"--batches {options.batches}: accepted are numbers from 1 on"
        )
        print(f"engines.py: {wrong}", file=sys.stderr)
        return 2
    met: dict[Layer, tuple[str, Layer]] = {}
    for name in names:
        for layer in convolutions(NETWORKS[name], max(batches)):
            met.setdefault(replace(layer, name="", count=1), (name, layer))
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = wheel_library(Path(folder))
        except Unavailable as error:
            print(f"engines.py: {error}", file=sys.stderr)
            return 2
        rows = survey(NoCard(library), list(met.values()), batches)
    write(options.output, rows, batches, spelled(library.version), " ".join(sys.argv[1:]))
    Console().print(options.output.with_suffix(".md").read_text())
    return 0


def write(output: Path, rows: list[dict[str, Any]], batches: list[int], version: str, arguments: str) -> None:
    heads = [
        "type",
        "memory format",
        "direction",
        "layers",
        "engines, median",
        "most MiB",
        "over 64 MiB",
        "of these fit when cut",
    ]
    lines = summary(rows, max(batches))
    table = ["| " + " | ".join(row) + " |" for row in (heads, [":--"] * 3 + ["--:"] * 5, *lines)]
    notes = Counter(
        NumericalNote(n).name
        for row in rows
        for known in row["engines"].values()
        for n in known["notes"]
        if n in set(NumericalNote)
    )
    text = f"""# The engines of cuDNN for the networks' convolutions on an H200

`{" ".join(["python benchmarks/layers/engines.py", arguments]).strip()}`

cuDNN {version}; plans finalized from an H200's properties on a machine without a GPU, knobs at their defaults. Engines
that compile their kernels at run time need a driver and are left out. Nothing was run or timed. Workspaces are at a
mini-batch of {max(batches)}; a layer counts as "over" where an engine needs more than 64 MiB there, and as fitting when
cut where such an engine needs no more at one of {", ".join(map(str, batches))}.

{chr(10).join(table)}

Numerical notes met: {", ".join(f"{name} {count:,}" for name, count in notes.most_common())}.
"""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".md").write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
