"""The figures of benchmarks/gpu/gpu.py as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from benchmarks.harness import Record
from benchmarks.table import Table

MIB = 2**20

NOTES = """Medians of events on the device, arms in turn, the L2 cache overwritten before every call. "x undivided",
"x stock" and "x capped" say how many times as fast the divided plan is as (a) the best undivided plan within the same
limit, (b) torch with `benchmark=True` and no cap, (c) the same with `CUDNN_CONV_WSCAP_DBG` at the limit. Plans within a
limit are made of cuDNN's algorithms alone; torch's own kernel, whose scratch memory nobody limits, is only compared
with. What takes it less than 0.1 ms is left to it, and has no plan. Peaks are of what a call allocates, its result
included. "Patched" is torch under mucudnn within 64 MiB. "By step" is mucudnn with `workspace_limit="peak"`."""

OVER, LAYER = ("undivided", "stock", "capped"), ("group", "layer", "direction")


def tables(found: Mapping[str, Record], rows: bool = False) -> list[Table]:
    """A table per question that was measured; with ``rows`` also all layers, a table per policy and precision."""
    layers, steps, costs = (
        [row for key, row in found.items() if key.startswith(f"{kind}/") and "failed" not in row]
        for kind in ("layers", "iterations", "costs")
    )
    made = [_speedups(layers), _iterations(steps), _costs(costs, layers), _failures(found)]
    if rows:
        made += [_details(list(each), *names) for names, each in _grouped(layers, "policy", "precision")]
    return [table for table in made if table.rows]


def markdown(found: Mapping[str, Record]) -> str:
    """All tables, and where they were measured."""
    where = next(iter(found.values()))["about"] if found else {}
    about = ", ".join(f"{name} {value}" for name, value in where.items())
    head = f"# Convolutions on a GPU\n\n`python benchmarks/gpu/gpu.py`: {about}.\n\n{NOTES}"
    return "\n\n".join([head, *(table.markdown() for table in tables(found, rows=True))]) + "\n"


def _grouped(rows: list[Record], *names: str) -> Iterable[tuple[tuple[str, ...], Iterable[Record]]]:
    """Rows with equal values under the names together, in the order of their first occurrence."""

    def values(row: Record) -> tuple[str, ...]:
        return tuple(row["unit"][name] for name in names)

    order = {key: place for place, key in enumerate(dict.fromkeys(map(values, rows)))}
    return groupby(sorted(rows, key=lambda row: order[values(row)]), key=values)


def _limits(row: Record) -> list[tuple[int, Record]]:
    return sorted((int(limit), entry) for limit, entry in row["limits"].items())


def _speedups(layers: list[Record]) -> Table:
    headings = (
        *("policy", "precision", "layers", "limit MiB", "plans"),
        *(f"x {arm}: {word}" for arm in OVER for word in ("mean", "least", "max")),
        *("patched x stock: least", "of"),
    )
    rows = []
    for names, grouped in _grouped(layers, "policy", "precision", "group"):
        members = list(grouped)
        entries = [entry for row in members for entry in _limits(row)]
        patched, which = min((r["patched"]["over_stock"], " ".join(r["unit"][n] for n in LAYER)) for r in members)
        for limit in sorted({limit for limit, _ in entries}):
            here = [entry for other, entry in entries if other == limit]
            planned = f"{sum(entry['divided'] is not None for entry in here)} of {len(here)}"
            cells = [cell for arm in OVER for cell in _spread([e["over"][arm] for e in here])]
            rows.append((*names, str(limit // MIB), planned, *cells, f"{patched:.3f}", which))
    return Table("Layers: speed of the divided plan (geometric means)", headings, rows)


def _spread(values: Sequence[float | None]) -> tuple[str, str, str]:
    known = [value for value in values if value is not None]
    if not known:
        return "-", "-", "-"
    return f"{statistics.geometric_mean(known):.3f}", f"{min(known):.3f}", f"{max(known):.3f}"


def _iterations(steps: list[Record]) -> Table:
    arms = ("stock", "capped", "mucudnn", "by step")
    ratios = {"stock": "x stock", "capped": "x capped", "stock by step": "by step x stock"}
    headings = (
        *("network", "precision", "limit MiB", *(f"{arm} ms" for arm in arms), *ratios.values()),
        *(*(f"{arm} peak GiB" for arm in arms), "measuring s", "planning s"),
    )
    rows = []
    for row in steps:
        unit, peaks = row["unit"], (row["peaks"].get(arm) for arm in arms)
        cells = [_figure(row["seconds"].get(arm), 1e3) for arm in arms]
        cells += [_figure(row["over"].get(name)) for name in ratios]
        cells += [_figure(peak, 2**-30, 2) for peak in peaks]
        cells += [_figure(row[name], 1, 1) for name in ("benchmarking", "planning")]
        rows.append((unit["network"], unit["precision"], str(unit["limit"] // MIB), *cells))
    return Table("Training steps", headings, rows)


def _costs(costs: list[Record], layers: list[Record]) -> Table:
    rows = []
    for row in costs:
        rows.append(("detour of a call left to torch, µs", f"{row['shim'] - row['stock']:.1f}"))
        rows.append((f"a part of a plan ({row['algorithm']}), µs", f"{row['part']:.1f}"))
    if layers:
        launches, measuring, planning = (
            sum(row[name] for row in layers) for name in ("launches", "benchmarking", "planning")
        )
        rows.append((f"{len(layers)} layers, measuring {launches} launches, s", f"{measuring:.1f}"))
        rows.append((f"{len(layers)} layers, planning, s", f"{planning:.2f}"))
    return Table("What mucudnn itself costs", ("", "cost"), rows)


def _failures(found: Mapping[str, Record]) -> Table:
    """What failed: whole units, and parts of others."""
    rows = []
    for key, row in found.items():
        reasons = [row.get("failed"), *(f"{arm}: {why}" for arm, why in row.get("failures", {}).items())]
        for limit, entry in row.get("limits", {}).items():
            at = f"{int(limit) // MIB} MiB"
            reasons.append(f"{at}, capped: {entry['capped_failed']}" if "capped_failed" in entry else None)
            for kind in ("undivided", "divided"):
                plan = entry[kind]
                reasons.append(f"{at}, {kind}: {plan['failed']}" if plan and "failed" in plan else None)
        rows += [(key, reason) for reason in reasons if reason is not None]
    return Table("What failed", ("unit", "why"), rows)


def _details(members: list[Record], policy: str, precision: str) -> Table:
    headings = (
        *("layer", "direction", "limit MiB", "stock ms", "capped ms", "undivided ms", "divided ms"),
        *("x undivided", "x stock", "x capped", "workspace MiB", "stock peak MiB", "capped peak MiB", "peak MiB"),
        *("off stock by", "plan"),
    )
    rows = []
    for row in members:
        for limit, entry in _limits(row):
            undivided, divided = entry["undivided"] or {}, entry["divided"] or {}
            times = (row["stock"], entry["capped"], undivided.get("seconds"), divided.get("seconds"))
            sizes = (divided.get("workspace"), row["stock_peak"], entry["capped_peak"], divided.get("peak"))
            cells = [_figure(seconds, 1e3) for seconds in times]
            cells += [_figure(entry["over"][name]) for name in OVER]
            cells += [_figure(size, 1 / MIB, 1) for size in sizes]
            error, plan = divided.get("error"), divided.get("division", "-")
            name = f"{row['unit']['group']} {row['unit']['layer']}"
            off = "-" if error is None else f"{error:.0e}"
            rows.append((name, row["unit"]["direction"], str(limit // MIB), *cells, off, plan))
    return Table(f"{precision}, policy {policy}", headings, rows)


def _figure(value: float | None, times: float = 1, digits: int = 3) -> str:
    return "-" if value is None else f"{value * times:.{digits}f}"
