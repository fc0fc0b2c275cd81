"""Warnings that name what is wrong, without a source line of these packages, and other lines for a user."""

from __future__ import annotations

import sys
import warnings
from typing import Any

_shown: dict[Any, Any] = {}


def warn(what: str, package: str = "mucudnn") -> None:
    """A RuntimeWarning of one line, which Python shows as `mucudnn:0: RuntimeWarning: ...`; once for each text."""
    warnings.warn_explicit(" ".join(what.split()), RuntimeWarning, filename=package, lineno=0, registry=_shown)


def print_line(line: str) -> None:
    """Prints a line on stderr; a bar of tqdm that a program shows there is cleared meanwhile."""
    tqdm: Any = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if tqdm is None or sys.stderr is None:
        print(line, file=sys.stderr, flush=True)
    else:
        tqdm.write(line, file=sys.stderr)
