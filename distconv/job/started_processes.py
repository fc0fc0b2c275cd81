"""Programs that a script starts by `subprocess` or `os.system`: every rank starts its own, which a line says."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from distconv.tensors.user_lines import program_lines
from mucudnn.process.substitution import substituted
from mucudnn.process.warning import print_line


@contextlib.contextmanager
def starts_reported() -> Iterator[None]:
    """A context in which each line of the script that starts a program is named once, on stderr."""
    known: set[str] = set()

    def reported(start: Callable[..., Any], place: int) -> Callable[..., Any]:
        def started(*args: Any, **kwargs: Any) -> Any:
            line = next((line for line, own in program_lines(sys._getframe(1)) if own), "")
            if line and line not in known:
                known.add(line)
                name = _name([*args, *kwargs.values()][place])
                print_line(
                    f"distconv: {line}: every rank starts {name}, and what it writes is written by each of them; under"
                    " `if distconv.is_first():` it starts once"
                )
            return start(*args, **kwargs)

        return started

    begin: Any = subprocess.Popen.__init__
    with substituted(subprocess.Popen, __init__=reported(begin, 1)), substituted(os, system=reported(os.system, 0)):
        yield


def _name(given: Any) -> str:
    """The name of the program in a command: a text, a path, or a list that begins with one."""
    first = given if isinstance(given, str | bytes | os.PathLike) else next(iter(given), "")
    return os.path.basename(os.fsdecode(first).partition(" ")[0]) or "a program"
