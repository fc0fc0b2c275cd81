"""Warnings that name what is wrong, without a source line of these packages."""

from __future__ import annotations

import warnings
from typing import Any

_shown: dict[Any, Any] = {}


def warn(what: str, package: str = "mucudnn") -> None:
    """A RuntimeWarning of one line, which Python shows as `mucudnn:0: RuntimeWarning: ...`; once for each text."""
    warnings.warn_explicit(" ".join(what.split()), RuntimeWarning, filename=package, lineno=0, registry=_shown)
