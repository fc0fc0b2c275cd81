"""Suggests the known name that was probably meant by an unknown one."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable

_reported: set[str] = set()


def meant(name: str, known: Iterable[str], prefix: str = "") -> str:
    """What a message about an unknown name adds: the nearest known one, where one is near.

    ``prefix``: of all the names, which does not count in how near they are.
    """
    words = [each.removeprefix(prefix) for each in known]
    near = difflib.get_close_matches(name.removeprefix(prefix), words, n=1, cutoff=0.75)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""


def report_unknown(prefix: str, known: Iterable[str]) -> None:
    """Prints a line for each environment variable that has a prefix and that nobody reads, once in a process.

    Args:
        prefix: such as "MUCUDNN".
        known: the variables that are read.
    """
    known = list(known)
    for name in os.environ:
        if name.startswith(f"{prefix}_") and name not in known and name not in _reported:
            _reported.add(name)
            ending = meant(name, known, f"{prefix}_") or f"; there are {', '.join(known)}"
            print(f"{prefix.lower()}: the environment variable {name} is not read{ending}", file=sys.stderr)
