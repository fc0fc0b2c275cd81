"""The error of an operator that cannot run on its shards."""

from __future__ import annotations

from typing import Any


class UnsupportedOperation(NotImplementedError):
    """An operator that cannot run on its shards; raised alike on every rank before any communication."""


def refuse(func: Any, why: str) -> UnsupportedOperation:
    """The error to raise for an operator that cannot run on these shards."""
    return UnsupportedOperation(f"{func}: {why}")
