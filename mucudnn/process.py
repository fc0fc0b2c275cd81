"""What a process has once: locks that are free in the child of a fork, attributes in the place of others for a while,
bounded tables that threads share, and the lines that a user sees.

Of all threads only the one that forked runs in the child. A lock that another thread had taken would stay locked there
for ever, and what that thread was doing never ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A dict for decisions about shapes that may never recur: it forgets what was put in first when it has more than
    so many entries.

    Reading costs what it costs in any dict: nothing is noted of it, as an LRU cache would. Entries are put in by
    ``recent[key] = value`` alone; threads may do so at once, and then read with ``get``.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most  # Entries.

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self.most:
            with contextlib.suppress(KeyError, RuntimeError):  # another thread does the same
                del self[next(iter(self))]


_ABSENT: Any = object()
_lock = renewed(threading.Lock())
_replaced: dict[tuple[Hashable, str], tuple[Any, list[list[Any]]]] = {}
"""By owner and name: what was there before, and the replacements that have not ended, each in a list of its own."""


@contextmanager
def substituted(owner: Any, /, **attributes: object) -> Iterator[None]:
    """A context in which a module or class has other attributes. At its end it has its own again.

    Several threads may replace the same name, and end in any order: the latest replacement that has not ended is in
    place, and after the last one what was there before the first. So it is with `environment` and `switching_often`.
    """

    def put(name: str, value: Any) -> None:
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    with _replacing(owner, attributes, lambda name: vars(owner).get(name, _ABSENT), put):
        yield


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """A context in which environment variables have other values. At its end they are as they were before."""

    def put(name: str, value: Any) -> None:
        if value is _ABSENT:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    with _replacing("environment", variables, lambda name: os.environ.get(name, _ABSENT), put):
        yield


SWITCH_SECONDS = 5e-4


@contextmanager
def switching_often() -> Iterator[None]:
    """A context in which a thread that computes in Python is interrupted for others ten times as often as by default.

    A call of torch lets other threads run. Where Python computes for milliseconds in place of such a call, a thread
    that only needs a moment (of a loader, a progress bar, a server) would wait five for each of its steps.
    """
    with _switching(min(SWITCH_SECONDS, sys.getswitchinterval())):
        yield


def switching_never() -> AbstractContextManager[None]:
    """A context of a moment, in which other threads of Python only run where this one waits or calls what lets them."""
    return _switching(3600.0)


def _switching(seconds: float) -> AbstractContextManager[None]:
    def put(_: str, seconds: float) -> None:
        sys.setswitchinterval(seconds)

    return _replacing("switch interval", {"": seconds}, lambda _: sys.getswitchinterval(), put)


@contextmanager
def _replacing(
    owner: Hashable, values: dict[str, Any], own: Callable[[str], Any], put: Callable[[str, Any], None]
) -> Iterator[None]:
    replacements = {name: [value] for name, value in values.items()}
    begun: list[str] = []
    try:
        with _lock:
            for name, replacement in replacements.items():
                before = own(name)
                put(name, replacement[0])
                _replaced.setdefault((owner, name), (before, []))[1].append(replacement)
                begun.append(name)
        yield
    finally:
        with _lock:
            for name in begun:
                before, current = _replaced[owner, name]
                current[:] = [one for one in current if one is not replacements[name]]
                put(name, current[-1][0] if current else before)
                if not current:
                    del _replaced[owner, name]


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
