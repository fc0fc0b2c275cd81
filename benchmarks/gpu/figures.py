"""The figures of benchmarks/gpu/fifteen.py: a line of JSON each, and a page that shows all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

MOST_ROWS = 80
"""Figures of a step that the page shows; the file has all of them."""


class Figures:
    """Appends to a file of figures. Several processes may do so at the same time.

    Args:
        path: of the file, which need not exist.
        step: the step of `fifteen.py` that the figures belong to.
    """

    def __init__(self, path: Path, step: str) -> None:
        self._path, self._step = path, step

    def add(self, name: str, value: float | str | None, unit: str = "", **about: Any) -> None:
        """Appends a figure; it is in the file before this returns.

        Args:
            name: of the figure; a later one of the same name replaces it.
            value: a number in ``unit``, or a text.
            about: whatever else belongs to the figure, as JSON.
        """
        entry = {"step": self._step, "name": name, "value": value, "unit": unit, **({"about": about} if about else {})}
        line = (json.dumps(entry) + "\n").encode()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)  # one call: lines of several processes do not mix
        finally:
            os.close(file)
        print(f"{self._step}: {name}: {shown(value)} {unit}".rstrip(), flush=True)

    def has(self, name: str) -> bool:
        """Whether an earlier run, or this one, has added the figure."""
        return any(entry["name"] == name for entry in read(self._path).get(self._step, ()))


def read(path: Path) -> dict[str, list[Entry]]:
    """The figures of a file by step, each name once. A line that was cut off is left out."""
    found: dict[str, dict[str, Entry]] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found.setdefault(entry["step"], {})[entry["name"]] = entry
    return {step: list(entries.values()) for step, entries in found.items()}


def shown(value: float | str | None) -> str:
    """A value as a page shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else " ".join(str(value).split()).replace("|", "/")


def summary(states: Mapping[str, Mapping[str, Any]], figures: Mapping[str, list[Entry]], title: str) -> str:
    """A page in Markdown: a row for every step, then the figures of each.

    Args:
        states: by step: ``state`` and ``seconds``.
        figures: by step, as `read` returns them.
    """
    lines = [f"# {title}", "", "| step | state | s | figures |", "| :-- | :-- | --: | --: |"]
    for step, state in states.items():
        seconds = state.get("seconds")
        lines.append(
            f"| {step} | {shown(state['state'])} | {'' if seconds is None else f'{seconds:.1f}'}"
            f" | {len(figures.get(step, ()))} |"
        )
    for step, entries in figures.items():
        lines += ["", f"## {step}", "", "| figure | value | unit |", "| :-- | --: | :-- |"]
        lines += [f"| {entry['name']} | {shown(entry['value'])} | {entry['unit']} |" for entry in entries[:MOST_ROWS]]
        if len(entries) > MOST_ROWS:
            lines += ["", f"{len(entries) - MOST_ROWS} more are in figures.jsonl."]
    return "\n".join(lines) + "\n"
