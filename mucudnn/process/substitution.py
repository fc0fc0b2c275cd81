"""Puts other attributes in the place of a module's or class's own for a while, or other environment variables, or
another interval at which threads of Python take turns.

Several threads may replace the same name, and end in any order: the latest replacement that has not ended is in place,
and after the last one what was there before the first.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mucudnn.process.at_fork import renewed

_ABSENT: Any = object()
_lock = renewed(threading.Lock())
_replaced: dict[tuple[Hashable, str], tuple[Any, list[list[Any]]]] = {}
"""By owner and name: what was there before, and the replacements that have not ended, each in a list of its own."""


@contextmanager
def substituted(owner: Any, /, **attributes: object) -> Iterator[None]:
    """A context in which a module or class has other attributes. At its end it has its own again."""

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
