"""The figures of benchmarks/distributed/distributed.py for people: tables on the terminal and in Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.distributed.cases import CASES
from benchmarks.distributed.channels import BATCH, FIXED
from benchmarks.distributed.wide import TITLE
from benchmarks.table import Table, save

RESULT = "distributed-cpu"

TARGET_FIXED_MS, TARGET_MEMORY, TARGET_TRAFFIC = 2.0, 0.28, 196_608
TARGET_HELD, TARGET_REDUCED = 0.27, 0.5
TARGET_CHANNELS_MS = 3.0


def tables(record: dict[str, Any]) -> list[Table]:
    """A table per question that was measured."""
    parts = (_speed, _fixed, _memory, _traffic, _wide)
    made = (*(part(record) for part in parts), *_channels(record))
    return [table for table in made if table.rows]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{1 if seconds >= 0.1 else 2}f}"


def _ratio(above: float | None, below: float | None) -> str:
    return "-" if above is None or below is None else f"{above / below:.2f}"


ARMS = (
    *("one process", "one process, a thread per rank", "one process, compiled", "slab", "slabs at once"),
    *("Gloo", "Gloo, compiled", "MPI", "MPI, compiled"),
)


def _speed(record: dict[str, Any]) -> Table:
    headings = ("case", "ranks", *ARMS, "Gloo - slab", "one process / Gloo")
    rows = []
    for row in record["speed"]:
        seconds = row["seconds"]
        gloo, slab = seconds.get("Gloo"), seconds.get("slab")
        over = None if gloo is None or slab is None else gloo - slab
        rows.append(
            (
                CASES[row["case"]].title,
                f"{row['ranks']}: {row['partition']}",
                *(_ms(seconds.get(arm)) for arm in ARMS),
                _ms(over),
                _ratio(seconds.get("one process"), gloo),
            )
        )
    return Table("Forward + backward, median milliseconds, one thread per rank", headings, rows)


def _fixed(record: dict[str, Any]) -> Table:
    title = f"{CASES['conv-small'].title}, 2 ranks: fixed cost in milliseconds (target {TARGET_FIXED_MS:g} on Gloo)"
    return _over(title, record["fixed"], {"the slab": "slab", "slabs at once": "slabs at once"})


def _over(title: str, measured: list[dict[str, Any]], below: dict[str, str]) -> Table:
    """Medians of all arms, and by how much some exceed those ``below``, {what it is called: arm}."""
    rows = []
    for row in measured:
        for arm, seconds in row["seconds"].items():
            more = row["over"].get(arm, {})
            cells = (_ms(more[base]) if base in more else "" for base in below.values())
            rows.append((f"{row['transport']}: {arm}", _ms(seconds), *cells))
    return Table(title, ("", "median", *(f"over {base}, within a round" for base in below)), rows)


def _memory(record: dict[str, Any]) -> Table:
    rows = [
        (
            f"{CASES[row['case']].title}, {row['partition']}{how}",
            f"{row['whole'] / 2**20:.1f}",
            ", ".join(f"{share / 2**20:.1f}" for share in row[kind]),
            f"{max(row[kind]) / row['whole']:.3f}",
            f"{row['parameters'] / 2**20:.1f}",
        )
        for row in record["memory"]
        for kind, how in (("shares", ""), ("compiled", ", compiled"))
        if kind in row
    ]
    title = f"Peak tensor memory of a step, MiB (target: largest share at most {TARGET_MEMORY} of one process)"
    return Table(title, ("", "one process", "each rank", "largest share", "parameters' gradients at its end"), rows)


def _traffic(record: dict[str, Any]) -> Table:
    rows = [
        (f"{CASES[row['case']].title}, {row['ranks']} ranks: {name}", str(calls), f"{moved:,}")
        for row in record["traffic"]
        for name, (calls, moved) in row["collectives"].items()
    ]
    title = f"What rank 0 hands to the transport in a step (target: halo at most {TARGET_TRAFFIC:,} bytes)"
    return Table(title, ("", "calls", "bytes"), rows)


def _wide(record: dict[str, Any]) -> Table:
    measured = record.get("wide", [])
    rows = []
    for row in measured:
        reduced, sent = max(row["reduced"]), max(row["sent"])
        rows.append(
            (
                row["partition"],
                f"{row['whole'] / 2**20:.1f}",
                f"{max(row['held']) / 2**20:.1f}",
                f"{max(row['held']) / row['whole']:.3f}",
                f"{reduced / 2**20:.1f}",
                f"{reduced / max(measured[0]['reduced']):.3f}",
                f"{sent / 2**20:.1f}",
                f"{sent / max(measured[0]['sent']):.3f}",
            )
        )
    title = (
        f"{TITLE}, 4 ranks, MiB: weights, gradients, Adam's state (target: {TARGET_HELD} of one process on channel=4),"
        f" and the gradients' allreduces (target: {TARGET_REDUCED} of sample=4 on sample=2,channel=2)"
    )
    headings = (
        "partition",
        "one process",
        "largest rank",
        "ratio",
        "allreduced by a rank",
        "ratio",
        "sent in a ring",
        "ratio",
    )
    return Table(title, headings, rows)


def _channels(record: dict[str, Any]) -> tuple[Table, Table]:
    moved = []
    for row in record.get("channels", []):
        channels, filters, size = row["layer"]
        name = f"{channels} to {filters} channels, {size}²: {row['algorithm']}, {row['partition']}"
        moved.append((name, f"{row['sent']:,}", f"{row['formula']:,.0f}", _ratio(row["sent"], row["formula"])))
    channels, filters, size = FIXED
    title = (
        f"conv2d, {channels} to {filters} channels {size}², batch {BATCH}, channel=2: fixed cost in milliseconds"
        f" (target {TARGET_CHANNELS_MS:g} on Gloo)"
    )
    return (
        Table("Bytes that all ranks send in a step of a 3x3 convolution", ("", "sent", "formula", "ratio"), moved),
        _over(title, record.get("channels_fixed", []), {"the share": "share", "shares at once": "shares at once"}),
    )


def keep(record: dict[str, Any]) -> None:
    """Writes the figures to benchmarks/results."""
    about = f"`{record['command']}`\n\nOne thread per rank, {record['conditions']}"
    save(RESULT, "What distributing costs on a CPU", about, tables(record), record)
