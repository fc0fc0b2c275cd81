"""The tables of `benchmarks/distributed/scaling.py`: for each machine, what takes how long, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.table import Table, save
from distconv.performance.machine import read_machine
from mucudnn.sizes import format_bytes

RESULT = "scaling"

Row = dict[str, Any]

ABOUT = (
    "Simulated, not measured: milliseconds of a training step of a batch that all GPUs share, from distconv's own rules"
    " and the numbers of a machine file (kernels by a roofline). *samples* divides samples alone, *single* is the"
    " fastest single partition, *strategy* the fastest choice of a partition for each layer, each within a GPU's"
    " memory. *behind* is by how many per cent the strategy is faster than the single partition. A dash: there are"
    " more GPUs than samples; *memory*: it does not fit."
)


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each machine, and one of what comes of it."""
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    return [_steps(name, [row for row in rows if row["machine"] == name]) for name in machines] + [
        _gains(name, [row for row in rows if row["machine"] == name]) for name in machines
    ]


def _steps(machine: str, rows: Sequence[Row]) -> Table:
    headings = ("network, batch", "GPUs", "samples", "single", "strategy", "behind %", "memory", "partitions")
    return Table(f"{read_machine(machine).name}: ms a step", headings, [_line(row) for row in rows])


def _line(row: Row) -> tuple[str, ...]:
    single, best = row["single"], row["strategy"]
    text = "-" if best is None else format_bytes(int(best["memory"]))
    faster = "-" if single is None or best is None else f"{100 * (single['seconds'] / best['seconds'] - 1):.1f}"
    return (
        f"{row['network']}, {row['batch']}",
        str(row["ranks"]),
        _milliseconds(row["samples"], row["ranks"] <= row["batch"]),
        _milliseconds(single),
        _milliseconds(best),
        faster,
        text,
        "-" if best is None else "; ".join(best["partitions"]),
    )


def _milliseconds(plan: Row | None, may_run: bool = True) -> str:
    if not may_run:
        return "-"
    return f"{1e3 * plan['seconds']:.2f}" if plan is not None and plan["fits"] else "memory"


def _gains(machine: str, rows: Sequence[Row]) -> Table:
    found = []
    for network in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == network]
        samples = [row for row in mine if row["samples"] is not None and row["samples"]["fits"]]
        best = min((row for row in mine if row["strategy"]), key=lambda row: row["strategy"]["seconds"], default=None)
        if best is None:
            continue
        fastest = min(samples, key=lambda row: row["samples"]["seconds"], default=None)
        first = next(row for row in mine if row["strategy"])
        kept = first["strategy"]["seconds"] * first["ranks"] / best["strategy"]["seconds"] / best["ranks"]
        ratios = [
            (row["samples"]["gradients"] / row["strategy"]["gradients"], row["ranks"])
            for row in samples
            if row["strategy"]["gradients"] > 0
        ]
        less = max(ratios, default=None)
        found.append(
            (
                network,
                "-" if fastest is None else f"{1e3 * fastest['samples']['seconds']:.2f} on {fastest['ranks']}",
                f"{1e3 * best['strategy']['seconds']:.2f} on {best['ranks']}",
                "-" if fastest is None else f"{fastest['samples']['seconds'] / best['strategy']['seconds']:.2f}",
                "-" if less is None else f"{less[0]:.2f} on {less[1]}",
                f"{100 * kept:.0f} from {first['ranks']}",
            )
        )
    headings = (
        "network",
        "samples, fastest ms on GPUs",
        "strategy, fastest ms on GPUs",
        "times less training time",
        "times less allreduce, at most",
        "efficiency %",
    )
    return Table(f"{read_machine(machine).name}: what the strategies gain", headings, found)


def save_rows(rows: Sequence[Row]) -> None:
    """Writes the tables and the figures to benchmarks/results."""
    about = ABOUT + (
        " Training time compares the fastest step of each, whatever number of GPUs gives it. Allreduce compares the"
        " seconds of all allreduces of gradients, hidden ones too, on equal numbers of GPUs. Efficiency is that of the"
        " fastest strategy, from the fewest GPUs that the network fits."
    )
    save(RESULT, "Strong scaling to 2,048 GPUs, simulated", about, tables(rows), {"rows": list(rows)})
