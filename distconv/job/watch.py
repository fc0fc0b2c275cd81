"""Watches ranks: the first failure ends the other ranks, and one line names the rank that failed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO

from distconv.job.notices import Notices, how_it_ended, shell_code
from distconv.job.processes import Process, end_descendants
from distconv.job.signals import ASKING, ENDING, Signals

SAME_ERROR_SECONDS = 3.0  # after a rank failed by itself, what others get to fail likewise, or to show why
STOP_SECONDS = 3.0  # what a rank gets between SIGTERM and SIGKILL
HANDLER_SECONDS = 30.0  # what a script's own handler gets after a signal from outside, to write a checkpoint say

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.5  # between two looks at how ranks elsewhere are
_SHOWN_BYTES = 4000  # of what a rank wrote beneath Python before it crashed


class Watch:
    """Some ranks of a job, from their start to their end.

    processes: this process's children, by rank. size: the number of ranks in the job, None where it is not known.
    find_notices: gives the job's notices, None as long as not all ranks are connected.
    written: what ranks whose output is not shown have written to stderr beneath Python.
    """

    def __init__(
        self,
        processes: Mapping[int, Process],
        size: int | None,
        find_notices: Callable[[], Notices | None],
        written: Mapping[int, IO[bytes]],
    ) -> None:
        self._processes, self._size, self._find_notices, self._written = processes, size, find_notices, written
        self._parent = os.getppid()  # with which the ranks end
        self._codes: dict[int, int] = {}
        self.failed: tuple[int, int] | None = None  # the first rank to fail, here or elsewhere, and its code
        self.lost: tuple[int, str] | None = None  # a rank of a machine that is not heard any more, and a line about it
        self._signal: int | None = None  # a signal from outside that asks the job to end
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._killed = False
        self._look_at = 0.0

    def run(self) -> int:
        """Waits until all ranks have ended; the exit code for them."""
        with Signals() as signals:
            while True:
                for number in signals.taken():
                    self._pass_on(number)
                self._collect()
                if len(self._codes) == len(self._processes):
                    break
                self._look_around()
                self._act()
                time.sleep(_POLL_SECONDS)
            code = self._code()
            if code:
                end_descendants()
            return code

    def lose(self, rank: int, line: str) -> None:
        """Ends the job, soon, because a machine is not heard any more; from any thread."""
        self.lost = rank, line

    def end_at_once(self, line: str | None) -> None:
        """Ends the ranks, from another thread than that of `run`, which may wait for a lost store."""
        if line is not None:
            self._report(line)
        for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 0.0)):
            for process in self._running():
                process.send_signal(number)
            time.sleep(seconds)
        end_descendants()

    def _running(self) -> list[Process]:
        return [process for rank, process in self._processes.items() if rank not in self._codes]

    def _ask(self) -> None:
        """Reports where the ranks are, if this process watches the first."""
        notices = self._find_notices()
        if 0 not in self._processes:
            return
        if notices is None:
            self._report("not all ranks are connected yet")
        else:
            for line in notices.whereabouts():
                self._report(line)

    def _pass_on(self, number: int) -> None:
        if number == ASKING:
            self._ask()
            return
        if number in ENDING:
            self._look_around(at_once=True)  # a launcher's SIGTERM may follow from another rank's failure
            if self._signal is not None:  # asked twice
                self._kill_at = time.monotonic()
            elif self._stop_at is None:
                self._signal = number
                self._kill_at = time.monotonic() + HANDLER_SECONDS
                if 0 in self._processes:
                    self._report(f"ended by {signal.Signals(number).name}")
                if notices := self._find_notices():
                    notices.signalled()
        for process in self._running():
            process.send_signal(number)

    def _collect(self) -> None:
        now = time.monotonic()
        for rank, process in self._processes.items():
            code = None if rank in self._codes else process.poll()
            if code is None:
                continue
            notices = self._find_notices()
            if notices:
                if self._kill_at is not None and code < 0:  # this process may have killed it while it was ending
                    code = notices.endings().get(rank, code)
                notices.record(rank, code)
            self._codes[rank] = code
            if self._signal is not None:
                if code in (-self._signal, 128 + self._signal):  # the script has no handler: the others end likewise
                    self._kill_at = min(self._kill_at or now, now + STOP_SECONDS)
                elif code < 0 and not self._killed:
                    self._blame(rank, code)
            elif code and self.failed is None and self._stop_at is None:
                self.failed = rank, code
                self._stop_at = now + SAME_ERROR_SECONDS
        if self.failed and self.failed[1] < 0 and self._stop_at and self._stop_at > now:
            self._stop_at = now
            self._blame(*self.failed)

    def _look_around(self, at_once: bool = False) -> None:
        """Notes whether a rank that another process watches has failed, or the process that started this one ended."""
        now = time.monotonic()
        if self._stop_at is not None or (now < self._look_at and not at_once):
            return
        self._look_at = now + _LOOK_SECONDS
        if os.getppid() != self._parent:
            self._stop_at = now
        notices = self._find_notices()
        if notices is None or self._signal is not None:
            return
        endings = notices.endings()
        if notices.is_signalled():  # asked after the endings: a signal is noted before the ranks that it ends
            return
        if self.lost is not None:
            if notices.claim():
                self._report(self.lost[1])
            notices.record(self.lost[0], -signal.SIGKILL)  # what other machines read
            endings = {**endings, self.lost[0]: -signal.SIGKILL}
        for rank, code in endings.items():
            if code and rank not in self._processes:
                self.failed = rank, code
                self._stop_at = now + (SAME_ERROR_SECONDS if code > 0 else 0.0)

    def _act(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._killed = True
            for process in self._running():
                process.send_signal(signal.SIGKILL)
        elif self._stop_at is not None and now >= self._stop_at and self._kill_at is None:
            if self.failed is not None:
                self._blame(*self.failed)
            self._kill_at = now + STOP_SECONDS
            for process in self._running():
                process.send_signal(signal.SIGTERM)

    def _blame(self, rank: int, code: int) -> None:
        notices = self._find_notices()
        if notices is not None and not notices.claim():
            return
        self._report(how_it_ended(rank, self._size, code))
        if rank in self._written:
            self._written[rank].seek(0, os.SEEK_END)
            self._written[rank].seek(max(0, self._written[rank].tell() - _SHOWN_BYTES))
            sys.stderr.write(self._written[rank].read().decode(errors="replace"))
            sys.stderr.flush()

    def _report(self, line: str) -> None:
        print(f"distconv: {line}", file=sys.stderr, flush=True)

    def _code(self) -> int:
        if self._signal is not None:
            own = self._codes[min(self._codes)]  # the script's own where it has a handler that ends it
            return own if own >= 0 else 128 + self._signal
        failed = [self.failed[1]] if self.failed and self.failed[0] in self._processes else []
        return shell_code(next((code for code in (*failed, *self._codes.values()) if code), 0))
