"""The models of benchmarks/models/models.py: networks of seven libraries, with random weights and
small inputs."""

from __future__ import annotations

from benchmarks.models import medical, transformer, vision
from benchmarks.models.entry import Entry


def zoo() -> dict[str, Entry]:
    """Every model by its name, LIBRARY.MODEL."""
    found: dict[str, Entry] = {}
    for module in (vision, medical, transformer):
        found |= module.entries()
    return found
