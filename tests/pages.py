"""Reads the tables of pages."""

from __future__ import annotations


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table whose head begins so, below its rule."""
    lines = text[text.index(f"\n| {heading} |") + 1 :].splitlines()[2:]
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table
