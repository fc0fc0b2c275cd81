"""Replaces attributes of torch, and keeps one list of all replacements: `put_back` undoes them.

docs/replaced.md says of each what it is for.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from mucudnn.process import renewed

F = TypeVar("F", bound=Callable[..., Any])

INHERITED = object()  # The value in the list for an attribute that its owner inherits.

_one_at_a_time = renewed(threading.RLock())
_undo: list[Callable[[], object]] = []
_made: list[tuple[Any, str]] = []


def replace(owner: Any, name: str, value: object) -> None:
    """Gives a module, class or object another attribute, until everything is put back."""
    own = vars(owner).get(name, INHERITED)

    def put_back() -> None:
        now = vars(owner).get(name, INHERITED)
        if now is not value:
            if now is not own:
                warnings.warn(
                    f"distconv.shutdown: {owner_name(owner)}.{name} was replaced by others meanwhile, and stays",
                    stacklevel=4,
                )
        elif own is INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    setattr(owner, name, value)
    _undo.append(put_back)
    _made.append((owner, name))


def in_place_of(stock: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the place of ``stock``: it calls ``function(stock, *args, **kwargs)``."""

    @functools.wraps(stock)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    return called


def once_in_process(function: F) -> F:
    """A function that does something for the whole process: it runs once, and other threads wait until it has."""
    done: list[bool] = []

    @functools.wraps(function)
    def first(*args: Any) -> None:
        with _one_at_a_time:
            if not done:
                done.append(True)
                function(*args)

    first.again = done.clear  # type: ignore[attr-defined]
    return first  # type: ignore[return-value]


def until_put_back(function: F) -> F:
    """Makes the function run once, and once more after all was put back."""

    @once_in_process
    @functools.wraps(function)
    def counted(*args: Any) -> None:
        _undo.append(counted.again)  # type: ignore[attr-defined]
        function(*args)

    return counted  # type: ignore[return-value]


def when_put_back(undo: Callable[[], object]) -> None:
    """Has ``undo`` called when all is put back; the last one is called first."""
    _undo.append(undo)


def put_back() -> None:
    """Every attribute is again what it was before distconv replaced it."""
    with _one_at_a_time:
        while _undo:
            _undo.pop()()
        _made.clear()


def replaced() -> list[tuple[Any, str]]:
    """The owners and names of what is replaced now, in order."""
    return list(_made)


def owner_name(owner: Any) -> str:
    """The name of a module or class, or of an object's class, with its module."""
    found = owner if hasattr(owner, "__name__") else type(owner)
    module = getattr(found, "__module__", None)
    return f"{module}.{found.__qualname__}" if module else str(found.__name__)
