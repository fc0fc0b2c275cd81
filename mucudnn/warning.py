"""Warnings that name what is wrong, and no line of this package."""

from __future__ import annotations

import warnings
from typing import Any

_shown: dict[Any, Any] = {}


def warn(what: str) -> None:
    """A RuntimeWarning of one line, which Python shows as `mucudnn:0: RuntimeWarning: ...`."""
    warnings.warn_explicit(" ".join(what.split()), RuntimeWarning, filename="mucudnn", lineno=0, registry=_shown)
