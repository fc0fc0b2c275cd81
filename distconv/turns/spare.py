"""Reuses empty dicts and sets of calls that are over.

A call of a large model takes tens of thousands of them. To make so many anew would set off Python's garbage collection
of all objects of the process, every few calls.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from typing import Any

_spare: dict[type, list[Any]] = {dict: [], set: [], OrderedDict: []}
_left: list[list[Any]] = []
"""The containers of owners that are gone. Whether something else refers to them has not been checked yet."""

KINDS = frozenset(_spare)


class Spare:
    """Gives an owner empty containers of `KINDS`. Once the owner is gone, those without other references are reused."""

    def __init__(self, owner: object) -> None:
        self._taken: list[Any] = []
        weakref.finalize(owner, _left.append, self._taken).atexit = False
        _collect()

    def empty(self, kind: type) -> Any:
        """An empty container of a kind."""
        try:
            made = _spare[kind].pop()
        except IndexError:  # also where another thread has taken the last one
            made = kind()
        self._taken.append(made)
        return made

    def copy(self, given: dict[Any, Any]) -> dict[Any, Any]:
        """A dict of the same items."""
        made: dict[Any, Any] = self.empty(dict)
        made.update(given)
        return made


def _collect() -> None:
    while _left:
        try:
            taken = _left.pop()
        except IndexError:
            return
        taken.reverse()  # what contains others was taken before them
        while taken:
            each = taken.pop()
            if sys.getrefcount(each) == _OWN:
                each.clear()
                _spare[type(each)].append(each)


def _references() -> int:
    """The result of `sys.getrefcount` for an object to which a local variable alone refers."""
    each = object()
    return sys.getrefcount(each)


_OWN = _references()
