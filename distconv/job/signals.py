"""Takes signals one by one in a process that forwards them to others."""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from types import FrameType, TracebackType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # The signals that ask a job to end.

PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that reach every rank when the launcher receives them."""

ASKING = signal.SIGQUIT
"""The signal by which a user asks where the ranks are; Ctrl-\\ sends it."""

SAME_SECONDS = 1.0
"""Within it, a signal that arrives twice is one: the terminal has sent it, and the launcher has passed it on."""


class Signals:
    """A context in which this process notes ASKING and the signals of PASSED_ON instead of ending.

    Ignored signals stay ignored, but for ASKING, which a shell has its background jobs ignore.
    """

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()
        self._last: dict[int, float] = {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (*PASSED_ON, ASKING):
            if number == ASKING or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last.get(number, -SAME_SECONDS) >= SAME_SECONDS:
            self._arrived.append(number)
        self._last[number] = now

    def taken(self) -> list[int]:
        """The signals since the last call."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))]


def interrupts_are_silent() -> None:
    """Lets SIGINT end this process at once from now on, without a traceback from within its imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupts_are_exceptions() -> None:
    """Lets SIGINT raise KeyboardInterrupt from now on, as Python has it; where it is ignored it stays so."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def questions_end_nothing() -> None:
    """Lets this process ignore ASKING from now on; processes that it starts are still ended by it."""
    if signal.getsignal(ASKING) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(ASKING, lambda number, frame: None)


def endings_are_exits() -> None:
    """Lets a signal that asks this process to end raise SystemExit from now on, so that it leaves nothing behind."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def endings_are_ignored() -> None:
    """Lets nothing but SIGKILL end this process from now on before its own end."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
