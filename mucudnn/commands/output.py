"""Output of the commands, for people and for machines."""

from __future__ import annotations

import json
import os
import sys
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 100  # Columns that a table takes at most, unless a user wants its details.

_PIPED_WIDTH = 1000


def add_wide(parser: Any) -> None:
    """Adds `--wide`."""
    parser.add_argument("--wide", action="store_true", help=f"show all columns, also beyond {WIDTH} characters")


def show(file: IO[str], *parts: RenderableType, wide: bool = False) -> None:
    """Prints for people.

    Args:
        parts: tables, and sentences, which only a terminal breaks into lines.
        wide: tables are as wide as the terminal, or, in a pipe or a file, as it takes; else `WIDTH` at most.
    """
    from rich.console import Console

    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    if not wide:
        console.width = min(console.width, WIDTH)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str) and not console.is_terminal)


def print_json(value: Any) -> None:
    """Prints JSON for machines."""
    try:
        print(json.dumps(value, indent=2), flush=True)
    except BrokenPipeError:
        # The reader has had enough; at its end python would complain that it cannot flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
