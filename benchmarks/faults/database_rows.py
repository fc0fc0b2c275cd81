"""Rows of the database of measured times whose numbers follow from their own, so that lost and wrong ones are known."""

from __future__ import annotations

import warnings
from pathlib import Path
from random import Random
from typing import Any

from mucudnn.optimizer import Option
from mucudnn.timing.store import Store

Row = tuple[int, int]
"""(number of a writer, number of its record)."""


def key(row: Row) -> dict[str, Any]:
    """Of some rows the key is the writer's own; the others share theirs with all writers."""
    writer, count = row
    return {"shared": count} if count % 3 == 0 else {"writer": writer, "count": count}


def options(row: Row) -> list[Option]:
    """What a row holds: numbers that follow from its own, so that wrong ones are known."""
    writer, count = row
    random = Random(writer * 1_000_003 + count)
    size = random.choice((1, 1, 2, 40))  # some transactions are of several pages
    name = f"fft {writer}"
    return [Option(extent + 1, name, random.random(), random.randrange(1 << 40)) for extent in range(size)]


def compared(path: Path, committed: list[Row], writers: int) -> tuple[int, int]:
    """How many committed rows are not in a database, and how many rows of it are not what was written."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(str(path))
        found = {tuple(sorted(known.items())): launches for known, launches in store.contents()}
        store.close()
    told, lost, wrong = set(committed), 0, 0
    for row in committed:
        launches = found.get(tuple(sorted(key(row).items())), [])
        mine = [launch for launch in launches if launch.algorithm == f"fft {row[0]}"]
        lost += not mine
        wrong += bool(mine) and mine != options(row)
    for known, launches in found.items():  # also rows whose writer was killed before it could tell of them
        of = dict(known)
        for writer in {int(launch.algorithm.split()[1]) for launch in launches}:
            row = (writer, of.get("shared", of.get("count", -1)))
            mine = [launch for launch in launches if launch.algorithm == f"fft {writer}"]
            wrong += writer >= writers or dict(key(row)) != of or (row not in told and mine != options(row))
    return lost, wrong
