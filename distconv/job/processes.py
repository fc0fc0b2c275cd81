"""Ties processes together: a child ends with its parent, and the children of a process that has ended are found."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Protocol

_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36  # prctl's options
_KILL_SECONDS = 3.0


class Process(Protocol):
    """A watched process: a subprocess.Popen, or a forked child."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, -n where signal n killed it; None while it runs."""

    def send_signal(self, sig: int) -> None: ...


class ForkedChild:
    """A child that os.fork made, with the interface of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Returns when it has ended."""
        self.send_signal(signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.01)


def end_with(parent: int) -> None:
    """Has the kernel kill this process as soon as `parent`, the one that started it, has ended in whatever way."""
    if _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL):
        raise OSError("the kernel does not tie a process to the one that started it: prctl(PR_SET_PDEATHSIG) fails")
    if os.getppid() != parent:  # it ended before this process could be bound
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the parent of orphans among its descendants, so that `end_descendants` finds them."""
    _prctl(_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, value))


def end_descendants() -> None:
    """Kills every process that descends from this one, such as a DataLoader's workers of ranks that were killed.

    Repeated until none is left, as one may start another meanwhile; one that the kernel does not end is given up.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while (found := _descendants()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # pid (name, which may contain anything) state parent ...
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found.extend(children.get(pid, []))
    return found
