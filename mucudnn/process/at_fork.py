"""What the child of a fork must have anew: of all threads only the one that forked runs in it.

A lock that another thread had taken would stay locked there for ever, and what that thread was doing never ends.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

L = TypeVar("L")

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_actions: weakref.WeakKeyDictionary[object, list[Callable[[Any], object]]] = weakref.WeakKeyDictionary()
"""By object: its methods that the child calls."""


def renewed(lock: L) -> L:
    """The given lock or condition of `threading`, which is free in the child of every fork from now on."""
    _locks.add(lock)
    return lock


def in_child(action: Callable[[], object]) -> None:
    """Calls a method of an object in the child of every fork, after all locks are free, as long as the object lives."""
    method: Any = action
    _actions.setdefault(method.__self__, []).append(method.__func__)


def _after_fork() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()
    for owner, actions in list(_actions.items()):
        for action in actions:
            action(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
