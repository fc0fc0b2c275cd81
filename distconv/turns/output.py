"""What a program prints in a call that is computed in parts, or followed: it appears once, as in a plain call."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from distconv.turns.world import thread


class Muted:
    """A stream that writes nothing of a part, nor of ``thread``; what other threads write goes to ``stream``."""

    def __init__(self, stream: Any, thread: int | None = None) -> None:
        self._stream, self._thread = stream, thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Returns the number of characters, as any stream does."""
        if thread.part is not None or threading.get_ident() == self._thread:
            return len(text)
        return int(self._stream.write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each of several texts."""
        for line in lines:
            self.write(line)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """A context in which this thread prints nothing on stdout."""
    with contextlib.redirect_stdout(Muted(sys.stdout, threading.get_ident())):
        yield


class PartOutput:
    """The stdout of every part: the first one prints, unless the program redirects what a part prints."""

    def __init__(self, parts: int) -> None:
        self._callers = sys.stdout
        self._own: list[Any] = [sys.stdout, *[Muted(sys.stdout)] * (parts - 1)]

    def arrive(self, part: int | None) -> None:
        sys.stdout = self._callers if part is None else self._own[part]

    def leave(self, part: int) -> None:
        self._own[part] = sys.stdout
