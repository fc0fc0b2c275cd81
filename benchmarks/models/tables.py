"""What becomes of models under partitions, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.table import Table

Record = dict[str, Any]

SPACE = ("depth", "height", "width")
RUNS = ("ok", "runs")
REASON_LENGTH = 160


def tables(records: Sequence[Record]) -> list[Table]:
    """One table per library: every model under space and under channels; the first reason where it does not run."""
    libraries = sorted({record["model"].partition(".")[0] for record in records})
    return [_table(library, [r for r in records if r["model"].startswith(f"{library}.")]) for library in libraries]


def _table(library: str, records: Sequence[Record]) -> Table:
    models = sorted({record["model"] for record in records})
    rows = [_row(model, [r for r in records if r["model"] == model]) for model in models]
    return Table(library, ("model", "space", "channels", "what stops it"), rows)


def _row(model: str, records: Sequence[Record]) -> tuple[str, str, str, str]:
    space = next((r for r in records if is_space(r)), None)
    channels = next((r for r in records if not is_space(r)), None)
    stopped = next((r for r in (space, channels) if r is not None and r["result"] not in RUNS), None)
    reason = " ".join((stopped or {}).get("reason", "").split()).replace("|", "\\|")
    if len(reason) > REASON_LENGTH:
        reason = f"{reason[:REASON_LENGTH]} ..."
    return model.partition(".")[2], _word(space), _word(channels), reason


def _word(record: Record | None) -> str:
    return "" if record is None else record["result"]


def is_space(record: Record) -> bool:
    """Whether a partition is one of space, rather than of channels."""
    return any(axis.partition("=")[0] in SPACE for axis in record["partition"].split(","))


def summary(records: Sequence[Record], short: bool = False) -> str:
    """How many models run under both kinds of partition, under one and under none, and what became of the pairs."""
    counts = Counter(record["result"] for record in records)
    outcomes = ", ".join(f"{count} {result}" for result, count in counts.most_common())
    if short:
        return outcomes
    by_model: dict[str, dict[bool, bool]] = {}
    for record in records:
        by_model.setdefault(record["model"], {})[is_space(record)] = record["result"] in RUNS
    full = [found for found in by_model.values() if len(found) == 2]
    kinds = Counter((found[True], found[False]) for found in full)
    return (
        f"Of {len(full)} models, {kinds[True, True]} run under space and channels, {kinds[True, False]} under space"
        f" only, {kinds[False, True]} under channels only, {kinds[False, False]} under neither. Pairs: {outcomes};"
        f" {sum(record.get('compared', False) for record in records)} compared number by number."
    )
