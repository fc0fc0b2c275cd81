"""Output: what the commands print, for people and for machines."""

from __future__ import annotations

import json
import os
import sys
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

_PIPED_WIDTH = 1000


def show(file: IO[str], *parts: RenderableType) -> None:
    """Prints for people: as wide as the terminal, or, into a pipe or a file, as wide as it takes."""
    from rich.console import Console

    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    for part in parts:
        console.print(part)


def print_json(value: Any) -> None:
    """Prints JSON for machines."""
    try:
        print(json.dumps(value, indent=2), flush=True)
    except BrokenPipeError:
        # The reader has had enough; at its end python would complain that it cannot flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
