"""Table: figures for people, on the terminal and in Markdown, and kept in benchmarks/results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rich import table as rich_table

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Table:
    """Text cells under headings; the first column is a name, the others are figures."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def rich(self) -> rich_table.Table:
        from rich import table as rich_table

        shown = rich_table.Table(title=self.title)
        for index, heading in enumerate(self.headings):
            shown.add_column(heading, justify="right" if index else "left")
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        lines = [self.headings, tuple("--:" if index else ":--" for index in range(len(self.headings))), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])


def show(tables: Iterable[Table]) -> None:
    """Prints tables, wide enough to be read also where there is no terminal; in Markdown where there is no rich."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print("\n\n".join(table.markdown() for table in tables))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables:
        console.print(table.rich())


def save(name: str, title: str, about: str, tables: Iterable[Table], figures: Any = None) -> None:
    """Writes NAME.md, with the tables, to `RESULTS`; and NAME.json, with six digits of each figure, where a picture, a
    test or a later run reads it."""
    RESULTS.mkdir(exist_ok=True)
    body = "\n\n".join([f"# {title}", about, *(table.markdown() for table in tables)])
    (RESULTS / f"{name}.md").write_text(f"{body}\n")
    if figures is not None:
        write(name, figures)


def write(name: str, figures: Any) -> None:
    """Writes NAME.json to `RESULTS`."""
    figures = json.loads(json.dumps(figures), parse_float=lambda text: float(f"{float(text):.6g}"))
    (RESULTS / f"{name}.json").write_text(json.dumps(figures, separators=(",", ":")) + "\n")


def conditions() -> str:
    """Under which something is measured from here on, in a sentence: versions, the commit, the machine and its load."""
    load = f"; load of the machine before: {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    python = sys.version.split()[0]
    describe = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        commit = ""
    told = f", commit {commit}" if commit else ""
    return f"torch {torch.__version__}, Python {python}{told}, {os.cpu_count()} CPU cores{load}."
