"""What became of the cases, as tables."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.conformance.cases import kind_of
from benchmarks.conformance.peers import LIBRARIES
from benchmarks.table import Table

Record = dict[str, Any]

OUTCOMES = ("right", "wrong", "refused", "crash", "hang")
SAID_LENGTH = 200


def counts(records: Iterable[Record]) -> dict[str, int]:
    """How many cases had each outcome."""
    counted = collections.Counter(record["outcome"] for record in records)
    return {outcome: counted[outcome] for outcome in OUTCOMES}


def _versions(records: Sequence[Record]) -> list[str]:
    return sorted({", ".join(f"{name} {number}" for name, number in r["versions"].items()) for r in records})


def tables(records: Sequence[Record]) -> list[Table]:
    """Sums, right ones by family and by kind of partition, every layer, and what stops the libraries."""
    by_library = {name: [r for r in records if r["library"] == name] for name in LIBRARIES}
    by_library = {name: group for name, group in by_library.items() if group}
    titles = tuple(LIBRARIES[name].title for name in by_library)
    sums = [
        (title, str(len(group)), *map(str, counts(group).values()))
        for title, group in zip(titles, by_library.values(), strict=True)
    ]

    def compared(title: str, heading: str, key: Callable[[Record], str], cell: Callable[[list[Record]], str]) -> Table:
        rows = []
        for name in dict.fromkeys(map(key, records)):
            groups = [[r for r in group if key(r) == name] for group in by_library.values()]
            rows.append((name, *map(cell, groups)))
        return Table(title, (heading, *titles), rows)

    return [
        Table("All cases", ("library", "cases", *OUTCOMES), sums),
        compared("Right, by family of layers", "layers", lambda r: r["family"], _right),
        compared("Right, by kind of partition", "partition", lambda r: kind_of(r["partition"]), _right),
        compared("Every layer", "layer", lambda r: r["layer"], _told),
        Table("What stops them", ("library", "outcome", "cases", "for example", "it said"), _stops(by_library)),
    ]


def _right(group: list[Record]) -> str:
    return f"{counts(group)['right']} of {len(group)}"


def _told(group: list[Record]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in counts(group).items() if count)


def _stops(by_library: dict[str, list[Record]]) -> list[tuple[str, ...]]:
    """Messages that differ in numbers alone are one."""
    rows = []
    for name, group in by_library.items():
        alike: dict[tuple[str, str], list[Record]] = {}
        for record in group:
            if record["outcome"] != "right":
                alike.setdefault((record["outcome"], re.sub(r"[\d.e+-]+", "0", record["said"])[:60]), []).append(record)
        for (outcome, _), records in sorted(alike.items(), key=lambda item: -len(item[1])):
            first = records[0]
            said = " ".join(first["said"].split()).replace("|", "\\|")
            said = f"{said[:SAID_LENGTH]} ..." if len(said) > SAID_LENGTH else said
            example = f"{first['layer']}, {first['partition']}"
            rows.append((LIBRARIES[name].title, outcome, str(len(records)), example, said))
    return rows


def about(records: Sequence[Record], described: str) -> str:
    """What was run, with versions and dates."""
    lines = []
    for name in dict.fromkeys(record["library"] for record in records):
        own = [record for record in records if record["library"] == name]
        versions = _versions(own)
        dates = sorted({record["date"] for record in own})
        days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        lines.append(f"* {LIBRARIES[name].title}: {'; '.join(versions)}, run on {days}.")
    return "\n\n".join([described.strip(), "\n".join(lines)])
