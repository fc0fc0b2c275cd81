"""What becomes of models under partitions, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.models.entry import IN_TURN
from benchmarks.table import Table

Record = dict[str, Any]

KINDS = {"space": "under space", "channels": "under channels", "in turn": "with parts in turn"}
"""The kinds of partitions, as the tables' columns name them and as a sentence does."""

SPACE = ("depth", "height", "width")
RUNS = ("ok", "runs")
REASON_LENGTH = 160


def tables(records: Sequence[Record]) -> list[Table]:
    """One table per library: every model in every kind of partition; the first reason where it does not run."""
    libraries = sorted({record["model"].partition(".")[0] for record in records})
    return [_table(library, [r for r in records if r["model"].startswith(f"{library}.")]) for library in libraries]


def _table(library: str, records: Sequence[Record]) -> Table:
    models = sorted({record["model"] for record in records})
    rows = [_row(model, [r for r in records if r["model"] == model]) for model in models]
    return Table(library, ("model", *KINDS, "what stops it"), rows)


def _row(model: str, records: Sequence[Record]) -> tuple[str, ...]:
    by_kind = {kind_of(record): record for record in records}
    found = [by_kind.get(kind) for kind in KINDS]
    stopped = next((r for r in found if r is not None and r["result"] not in RUNS), None)
    reason = " ".join((stopped or {}).get("reason", "").split()).replace("|", "\\|")
    if len(reason) > REASON_LENGTH:
        reason = f"{reason[:REASON_LENGTH]} ..."
    return model.partition(".")[2], *map(_word, found), reason


def _word(record: Record | None) -> str:
    return "" if record is None else record["result"]


def kind_of(record: Record) -> str:
    """Which of `KINDS` a partition is."""
    if record["partition"].startswith(IN_TURN):
        return "in turn"
    return "space" if any(axis.partition("=")[0] in SPACE for axis in record["partition"].split(",")) else "channels"


def summary(records: Sequence[Record]) -> str:
    """How many models run in each kind of partition, and what became of all pairs of a model and a partition."""
    counts = Counter(record["result"] for record in records)
    outcomes = ", ".join(f"{count} {result}" for result, count in counts.most_common())
    tried = Counter(kind_of(record) for record in records)
    run = Counter(kind_of(record) for record in records if record["result"] in RUNS)
    kinds = ", ".join(f"{run[kind]} of {tried[kind]} {words}" for kind, words in KINDS.items())
    compared = sum(record.get("compared", False) for record in records)
    return f"Models that run: {kinds}. Pairs: {outcomes}; {compared} compared number by number."
