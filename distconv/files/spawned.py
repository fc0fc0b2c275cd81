"""Processes that multiprocessing starts anew, not by forking, have the files of the rank that starts them."""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import sys
from collections.abc import Callable, Iterator
from typing import Any

from mucudnn.process.substitution import substituted


class _Beginning:
    """Among what such a process is given first: reading it enters the files of the rank."""

    def __init__(self, entering: str) -> None:
        self._entering = entering

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, (self._entering,)


@contextlib.contextmanager
def spawned_with(entering: str) -> Iterator[None]:
    """A context in which such a process first runs some lines of Python, with this process's folders of modules."""
    usual: Any = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        lines = f"import sys\nsys.path[:] = {[str(folder) for folder in sys.path]!r}\n{entering}"
        return {"distconv": _Beginning(lines), **usual(name)}

    with substituted(multiprocessing.spawn, get_preparation_data=get_preparation_data):
        yield
