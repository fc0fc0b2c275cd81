"""The figures of benchmarks/gpu/gpu.py for people: summaries on the terminal, and all rows beside them in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from benchmarks.gpu.results import Results
from benchmarks.table import Table

MIB = 2**20
SLOWER = 0.98
"""A layer below this many times stock's speed counts as slower."""

SAME = 0.005
"""Within this of 1, a ratio is at 1.0."""

Row = dict[str, Any]


def summaries(results: Results) -> list[Table]:
    """A table per question that was measured."""
    layers, steps, costs = _of_kind(results, "layers"), _of_kind(results, "iterations"), _of_kind(results, "costs")
    made = (_speedups(layers), _needed(layers), _never_slower(layers), _iterations(steps), _costs(costs, layers))
    return [table for table in (*made, _failures(results)) if table.rows]


def details(results: Results) -> list[Table]:
    """A row per layer, direction and limit; a table per policy and precision."""
    layers = _of_kind(results, "layers")
    return [_details(list(rows), *names) for names, rows in _grouped(layers, "policy", "precision")]


def markdown(results: Results) -> str:
    """Everything, the summaries first."""
    about = ", ".join(f"{name} {value}" for name, value in (results.about or {}).items())
    parts = [f"# Convolutions on a GPU\n\n`python benchmarks/gpu/gpu.py`: {about}.\n\n{NOTES}"]
    parts += [table.markdown() for table in (*summaries(results), *details(results))]
    return "\n\n".join(parts) + "\n"


NOTES = """Medians of events on the device, arms in turn, the L2 cache overwritten before every call. "x undivided",
"x stock" and "x capped" say how many times as fast the divided plan is as (a) the best undivided plan within the same
limit, (b) torch with `benchmark=True` and no cap, (c) the same with `CUDNN_CONV_WSCAP_DBG` at the limit. Plans within a
limit are made of cuDNN's algorithms alone; torch's own kernel, whose scratch memory nobody limits, is only compared
with. What takes it less than 0.1 ms is left to it, and has no plan. Peaks are of what a call allocates, its result
included. "By step" is mucudnn with `workspace_limit="peak"`."""


def _of_kind(results: Results, kind: str) -> list[Row]:
    return [row for key, row in results.rows.items() if key.startswith(f"{kind}/") and "failed" not in row]


def _grouped(rows: list[Row], *names: str) -> Iterable[tuple[tuple[Any, ...], Iterable[Row]]]:
    """Rows with equal values under the names together, in the order of their first occurrence."""

    def values(row: Row) -> tuple[Any, ...]:
        return tuple(row["unit"][name] for name in names)

    order = {key: place for place, key in enumerate(dict.fromkeys(map(values, rows)))}
    return groupby(sorted(rows, key=lambda row: order[values(row)]), key=values)


def _limits(row: Row) -> list[tuple[int, Row]]:
    return sorted((int(limit), entry) for limit, entry in row["limits"].items())


def _speedups(layers: list[Row]) -> Table:
    headings = (
        *("policy", "precision", "layers", "limit MiB", "plans"),
        *("x undivided: mean", "max", "at 1.0", "x stock: mean", "least", "max", "x capped: mean", "least", "max"),
    )
    rows = []
    for names, members in _grouped(layers, "policy", "precision", "group"):
        entries = [entry for row in members for entry in _limits(row)]
        for limit in sorted({limit for limit, _ in entries}):
            here = [entry for other, entry in entries if other == limit]
            over = {name: [e["over"][name] for e in here if e["over"][name] is not None] for name in OVER}
            undivided, stock, capped = (over[name] for name in OVER)
            same = [value for value in undivided if abs(value - 1) <= SAME]
            share = f"{len(same) / len(undivided):.0%}" if undivided else "-"
            planned = f"{sum(entry['divided'] is not None for entry in here)} of {len(here)}"
            cells = (_mean(undivided), _most(undivided), share)
            cells += tuple(f(values) for values in (stock, capped) for f in (_mean, _least, _most))
            rows.append((*names, str(limit // MIB), planned, *cells))
    return Table("Layers: speed of the divided plan (geometric means)", headings, rows)


OVER = ("undivided", "stock", "capped")


def _needed(layers: list[Row]) -> Table:
    headings = (
        *("policy", "precision", "layers", "plans", "undivided MiB: median", "max"),
        *("divided MiB: median", "max", "undivided / divided: mean", "max"),
    )
    rows = []
    for names, members in _grouped(layers, "policy", "precision", "group"):
        needs = [row["needed"] for row in members if None not in row["needed"].values()]
        if not needs:
            continue
        kinds = {kind: [need[kind] / MIB for need in needs] for kind in ("undivided", "divided")}
        # A ratio to no workspace at all has no meaning; less than 1 MiB counts as that.
        saved = [max(need["undivided"] / MIB, 1) / max(need["divided"] / MIB, 1) for need in needs]
        cells = [f"{f(kinds[kind]):.1f}" for kind in kinds for f in (statistics.median, max)]
        rows.append((*names, str(len(needs)), *cells, _mean(saved), _most(saved)))
    title = "Workspace to stay within 2 % of the best undivided plan's time without a limit"
    return Table(title, headings, rows)


def _never_slower(layers: list[Row]) -> Table:
    rows = []
    for names, members in _grouped(layers, "policy", "precision"):
        found = [(row["patched"]["over_stock"], _title(row)) for row in members]
        slower = [f"{title} ({value:.3f})" for value, title in sorted(found) if value < SLOWER]
        least = min(value for value, _ in found)
        rows.append((*names, str(len(found)), f"{least:.3f}", str(len(slower)), "; ".join(slower) or "none"))
    headings = ("policy", "precision", "layers", "least x stock", f"below {SLOWER}", "which")
    return Table("Never slower: patched torch within 64 MiB beside torch as it is", headings, rows)


def _iterations(steps: list[Row]) -> Table:
    arms = ("stock", "capped", "mucudnn", "by step")
    ratios = {"stock": "x stock", "capped": "x capped", "stock by step": "by step x stock"}
    headings = (
        *("network", "precision", "limit MiB", *(f"{arm} ms" for arm in arms), *ratios.values()),
        *(f"{arm} peak GiB" for arm in arms),
        *("measuring s", "planning s"),
    )
    rows = []
    for row in steps:
        unit = row["unit"]
        peaks = (row["peaks"].get(arm) for arm in arms)
        rows.append(
            (
                *(unit["network"], unit["precision"], str(unit["limit"] // MIB)),
                *(_ms(row["seconds"].get(arm)) for arm in arms),
                *(_figure(row["over"].get(name)) for name in ratios),
                *("-" if peak is None else f"{peak / 2**30:.2f}" for peak in peaks),
                *("-" if row[name] is None else f"{row[name]:.1f}" for name in ("benchmarking", "planning")),
            )
        )
    return Table("Training steps", headings, rows)


def _costs(costs: list[Row], layers: list[Row]) -> Table:
    rows = []
    for row in costs:
        rows.append(("detour of a call left to torch, µs", f"{row['shim'] - row['stock']:.1f}"))
        rows.append((f"a part of a plan ({row['algorithm']}), µs", f"{row['part']:.1f}"))
    for names, members in _grouped(layers, "policy", "precision"):
        found = list(members)
        measuring, planning = (sum(row[name] for row in found) for name in ("benchmarking", "planning"))
        launches = sum(row["launches"] for row in found)
        title = f"{', '.join(names)}: {len(found)} layers"
        rows.append((f"{title}, measuring {launches} launches, s", f"{measuring:.1f}"))
        rows.append((f"{title}, planning, s", f"{planning:.2f}"))
    return Table("What mucudnn itself costs", ("", "cost"), rows)


def _failures(results: Results) -> Table:
    """What failed: whole units, and parts of others."""
    rows = []
    for key, row in results.rows.items():
        reasons = [row.get("failed"), *(f"{arm}: {why}" for arm, why in row.get("failures", {}).items())]
        for limit, entry in row.get("limits", {}).items():
            at = f"{int(limit) // MIB} MiB"
            reasons.append(f"{at}, capped: {entry['capped_failed']}" if "capped_failed" in entry else None)
            for kind in ("undivided", "divided"):
                plan = entry[kind]
                reasons.append(f"{at}, {kind}: {plan['failed']}" if plan and "failed" in plan else None)
        rows += [(key, reason) for reason in reasons if reason is not None]
    return Table("What failed", ("unit", "why"), rows)


def _details(members: list[Row], policy: str, precision: str) -> Table:
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
            workspace, error = divided.get("workspace"), divided.get("error")
            rows.append(
                (
                    *(f"{row['unit']['group']} {row['unit']['layer']}", row["unit"]["direction"], str(limit // MIB)),
                    *map(_ms, times),
                    *(_figure(entry["over"][name]) for name in OVER),
                    *map(_mib, (workspace, row["stock_peak"], entry["capped_peak"], divided.get("peak"))),
                    "-" if error is None else f"{error:.0e}",
                    divided.get("division", "-"),
                )
            )
    return Table(f"{precision}, policy {policy}", headings, rows)


def _title(row: Row) -> str:
    return f"{row['unit']['group']} {row['unit']['layer']} {row['unit']['direction']}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _of(function: Callable[[Sequence[float]], float], values: Sequence[float]) -> str:
    return _figure(function(values)) if values else "-"


def _mean(values: Sequence[float]) -> str:
    return _of(statistics.geometric_mean, values)


def _least(values: Sequence[float]) -> str:
    return _of(min, values)


def _most(values: Sequence[float]) -> str:
    return _of(max, values)
