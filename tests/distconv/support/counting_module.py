"""A file of a program that keeps state in its variables, which other files reach by its name."""

from __future__ import annotations

from typing import Any

calls = 0
table: dict[str, int] = {}


class Total:
    """A class whose attributes count."""

    calls = 0


def count() -> int:
    """Counts its calls."""
    global calls
    calls += 1
    return calls


def reset() -> None:
    global calls
    calls = Total.calls = 0
    table.clear()


def kept() -> Any:
    return calls, Total.calls, dict(table)
