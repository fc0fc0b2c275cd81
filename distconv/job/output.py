"""Directs the output of a rank to the terminal or to a file."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def direct_output(rank: int, print_all_ranks: bool, beneath: int | None) -> TextIO:
    """Shows the first rank's output alone, or every rank's with its number. Returns a stream that is always shown.

    beneath: an open file to which the C code of other ranks writes its stderr, which may say why a rank crashes.
    """
    if print_all_ranks:
        shown = sys.stderr
        sys.stdout = Prefixed(sys.stdout, f"[{rank}] ")
        sys.stderr = Prefixed(sys.stderr, f"[{rank}] ")
        return shown
    if not rank:
        return sys.stderr
    shown = open(os.dup(sys.stderr.fileno()), "w")  # noqa: SIM115 (as long as the process)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if beneath is not None:
        os.dup2(beneath, 2)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)
    return shown


class Prefixed(io.TextIOBase):
    """Writes whole lines, each after a prefix."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix, self._line = stream, prefix, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def finish(self) -> None:
        if self._line:
            self.write("\n")
