"""What benchmarks share: arguments, arms in turn, children, records that a later run goes on from, and the end."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.table import RESULTS, Table, conditions, save, show

ROOT = Path(__file__).resolve().parents[1]

Record = dict[str, Any]


def parser(doc: str | None, saves: str = "") -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring, with ``--save`` where the benchmark keeps results of that name."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if saves:
        made.add_argument("--save", action="store_true", help=f"keep the figures in benchmarks/results/{saves}.*")
    made.set_defaults(before=conditions())
    return made


def turns(
    arms: Mapping[str, Callable[[], float]], seconds: float, least: int = 3, most: int = 400
) -> dict[str, list[float]]:
    """What each arm gives, round after round: a busy moment of the machine meets all of them. Every round begins with
    another arm. There are ``least`` rounds at least, and further ones within so many ``seconds``."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    order, began, count = list(arms), time.perf_counter(), 0
    while count < least or (count < most and time.perf_counter() - began < seconds):
        order = [*order[1:], order[0]]
        for name in order:
            found[name].append(arms[name]())
        count += 1
    return found


def child(script: str, *words: str, **environment: str) -> Any:
    """The JSON in the last line that a script prints, in a process of its own with one thread.

    Raises:
        SystemExit: where it fails, with the end of what it said.
    """
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, script, *words], env=surroundings, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{Path(script).name} {' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Records:
    """Records in a file, a line of JSON each: a later run goes on from them. The last one of a key counts."""

    def __init__(self, path: Path, *key: str) -> None:
        """
        Args:
            key: the fields by which a record is known.
        """
        self._path, self._key = path, key
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the process was killed while it wrote
            path.write_text(whole)
        self.found: dict[Any, Record] = {self._of(record): record for record in map(json.loads, whole.splitlines())}

    def _of(self, record: Record) -> Any:
        values = tuple(record[name] for name in self._key)
        return values if len(values) > 1 else values[0]

    def add(self, record: Record) -> None:
        self.found[self._of(record)] = record
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            print(json.dumps(record), file=file)


def joined(name: str, records: Iterable[Record], *key: str) -> list[Record]:
    """The records that are kept in results/NAME.json, with these in the place of those of the same key, and after."""
    path = RESULTS / f"{name}.json"
    found: dict[Any, Record] = {}
    for record in [*(json.loads(path.read_text()) if path.exists() else []), *records]:
        found[tuple(record[each] for each in key) or len(found)] = record
    return list(found.values())


def finish(
    options: argparse.Namespace,
    name: str,
    title: str,
    about: str | None,
    tables: Iterable[Table],
    figures: Any = None,
) -> None:
    """Shows the tables; with ``--save`` keeps them, with what they are ``about`` and under which conditions they were
    measured."""
    shown = list(tables)
    show(shown)
    if options.save:
        save(name, title, f"{(about or '').strip()}\n\n{options.before}", shown, figures)
