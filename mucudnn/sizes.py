"""Sizes in bytes as people write them, and the limit "peak", which is not a number."""

from __future__ import annotations

import math
import re
from numbers import Real

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{infix}b": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)")


class _Peak(float):
    """The limit that is no number: whatever does not raise a step's peak memory."""

    def __repr__(self) -> str:
        return "peak"

    __str__ = __repr__


PEAK = _Peak(math.inf)  # The workspace limit that means: as much as does not raise the peak memory of a training step.


def parse_bytes(value: object) -> float:
    """Bytes from a number or from text: "67108864", "64MiB", "1.5 GB", "unlimited" (`math.inf`).

    Units are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024), in any case.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        size = float(value)
        if size >= 0 and (size == math.inf or size.is_integer()):
            return size
        raise ValueError
    if not isinstance(value, str):
        raise ValueError
    text = value.strip().lower()
    if text == "unlimited":
        return math.inf
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise ValueError
    return float(math.floor(float(match[1]) * _UNITS[match[2]]))


def parse_limit(value: object) -> float:
    """As `parse_bytes`; also `PEAK`, and "peak" for it."""
    if value is PEAK or (isinstance(value, str) and value.strip().lower() == "peak"):
        return PEAK
    return parse_bytes(value)


def format_bytes(size: float) -> str:
    """Bytes as people read them, in the largest binary unit: "64 MiB", "1.5 GiB", "0 B", "unlimited"."""
    if size == math.inf:
        return "peak" if size is PEAK else "unlimited"
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if float(size).is_integer() else f"{size:.1f} {unit}"
