"""Where what a rank prints goes."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def direct_output(rank: int, print_all_ranks: bool) -> None:
    if print_all_ranks:
        sys.stdout = Prefixed(sys.stdout, f"[{rank}] ")
        sys.stderr = Prefixed(sys.stderr, f"[{rank}] ")
    elif rank:
        sys.stdout.flush()
        # Also what is printed beneath Python. Errors beneath Python stay: nothing else would tell of a crash.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)


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
