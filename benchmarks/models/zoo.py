"""The models of benchmarks/models/models.py: networks of seven libraries, with random weights and
small inputs."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator

from benchmarks.models import medical, transformer, vision
from benchmarks.models.entry import Entry


def zoo() -> dict[str, Entry]:
    """Every model by its name, LIBRARY.MODEL."""
    found: dict[str, Entry] = {}
    for module in (vision, medical, transformer):
        found |= module.entries()
    return found


def chosen(names: Iterable[str], patterns: Iterable[str]) -> Iterator[str]:
    """The names that match one of some patterns, as of the shell; all where there is none."""
    wanted = list(patterns) or ["*"]
    return (name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in wanted))
